"""`ulorl eval` on servers of known skill: figures, comparison, resuming, faults."""

import json
import shutil

import pytest
from aiohttp import web
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.evaluation.support import SkilledServer
from tests.fake_server import status
from tests.tiny_models import tiny_model
from ulorl_megatron.attempts import Attempt
from ulorl_megatron.cli import main
from ulorl_megatron.evaluation.results import results

SUMS = {f"{a}+{b}=?": str(a + b) for a in range(2, 6) for b in range(2, 8)}
K = 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """weak/ and strong/: HF folders that differ in their weights."""
    root = tmp_path_factory.mktemp("models")
    return [tiny_model(root / name, "dense", seed=seed) for seed, name in enumerate(("weak", "strong"))]


@pytest.fixture
def skilled(folders, shared_rule):
    strong = (folders[1] / "model.safetensors").read_bytes()
    return SkilledServer(SUMS, lambda weights: 0.9 if weights == strong else 0.3)


@pytest.fixture
def config(tmp_path, folders):
    def write(name, rows):
        (tmp_path / name).write_text("".join(json.dumps({"prompt": p, "answer": a}) + "\n" for p, a in rows))
        return tmp_path / name

    sums = write("sums.jsonl", SUMS.items())
    cut = write("cut.jsonl", [("a long one", "1"), *list(SUMS.items())[:3]])
    file = tmp_path / "config.yaml"
    file.write_text(
        f"run: {{dir: {tmp_path}/run}}\n"
        f"model: {{path: {folders[0]}, dtype: float32}}\n"
        f"data: {{train: none.jsonl, eval: {{sums: {sums}, cut: {cut}}}, max_prompt_length: 64}}\n"
        "rollout: {global_max_length: 48, segment_count: 2, request_timeout_s: 20, request_retries: 0}\n"
        "verifier: {workers: 1}\n"
        f"evaluation: {{samples_per_prompt: {K}}}\n"
    )
    return file


def evaluate(config, url, folders, *arguments):
    checkpoints = [item for folder in folders for item in ("--checkpoint", str(folder))]
    return main(["eval", str(config), f"servers.urls=[{url}]", *checkpoints, *arguments])


def data(tmp_path):
    return json.loads((tmp_path / "run" / "evaluation" / "results.json").read_text())


def test_two_checkpoints_side_by_side(config, folders, skilled, tmp_path, capsys):
    with skilled.running() as url:
        assert evaluate(config, url, folders) == 0
        out = tmp_path / "run" / "evaluation"
        report = (out / "report.md").read_text()
        assert report.strip() in capsys.readouterr().out

        found = {(r["checkpoint"], r["set"]): r for r in data(tmp_path)["results"]}
        weak, strong = found["weak", "sums"], found["strong", "sums"]
        for result, skill in ((weak, 0.3), (strong, 0.9)):
            assert result["problems"] == 24 and result["attempts_each"] == K
            assert result["accuracy"]["low"] < skill < result["accuracy"]["high"]
            assert result["pass_at"]["1"]["value"] == pytest.approx(result["accuracy"]["value"])
            assert result["truncated"] == 0 and result["unjudged"] == 0
        cut = found["strong", "cut"]
        assert cut["truncated"] == 1 / 4 and cut["lengths"]["max"] == 48 and cut["scores"][0] == 0

        comparison = next(c for c in data(tmp_path)["comparisons"] if c["set"] == "sums")
        assert (comparison["first"], comparison["second"]) == ("weak", "strong")
        assert comparison["p_value"] < 0.01 and comparison["difference"]["low"] > 0
        assert f"| avg@{K} |" in report and "Against weak:" in report and "## cut: 4 problems" in report

        lines = [json.loads(line) for line in (out / "responses" / "strong" / "sums.jsonl").read_text().splitlines()]
        assert len(lines) == 24 * K and {line["by"] for line in lines} == {"rule"}
        assert sum(line["reward"] for line in lines) / len(lines) == pytest.approx(strong["accuracy"]["value"])
        assert {line["response"] for line in lines if line["reward"] == 0} == {r"So it is \boxed{999}"}

        events = EventAccumulator(str(out / "tensorboard"))
        events.Reload()
        shown = [event.value for event in events.Scalars("sums/accuracy")]
        assert shown == pytest.approx([weak["accuracy"]["value"], strong["accuracy"]["value"]])

        asked = len(skilled.requests)
        assert evaluate(config, url, folders) == 0 and len(skilled.requests) == asked  # nothing is missing
        skilled.requests.clear()
        assert evaluate(config, url, folders[:1], "evaluation.samples_per_prompt=5") == 0
        assert len({tuple(r["input_ids"]) for r in skilled.requests}) >= 24  # one more of each, not five


def test_a_kill_loses_only_what_is_in_flight(config, folders, skilled, tmp_path, capsys):
    """The file as a kill leaves it: whole lines, and half of one."""
    one = ("data.eval.cut=" + str(tmp_path / "sums.jsonl"),)
    file = tmp_path / "run" / "evaluation" / "responses" / "weak" / "sums.jsonl"
    with skilled.running() as url:
        assert evaluate(config, url, folders[:1], *one) == 0
        before = file.read_bytes().splitlines(keepends=True)
        file.write_bytes(b"".join(before[:50]) + before[50][:20])
        first = len(skilled.requests)
        assert evaluate(config, url, folders[:1], *one) == 0
    after = file.read_bytes().splitlines(keepends=True)
    assert after[:50] == before[:50] and len(after) == len(before) == 24 * K
    assert 0 < len(skilled.requests) - first < first / 3
    capsys.readouterr()


def test_a_fault_keeps_what_was_answered(config, folders, skilled, tmp_path, capsys):
    """The server dies in the middle: an error in one line, and the same command goes on."""
    file = tmp_path / "run" / "evaluation" / "responses" / "weak" / "sums.jsonl"
    settings = (f"data.eval={tmp_path / 'sums.jsonl'}", "rollout.prompts_per_step=1", "rollout.group_size=4")
    with skilled.running() as url:
        skilled.faults = [as_it_is] * 10 + [status(500)] * 4
        assert evaluate(config, url, folders[:1], *settings) == 2
        error = capsys.readouterr().err
        assert "give the same command again" in error and "Traceback" not in error
        kept = len(file.read_text().splitlines())
        assert 0 < kept < 24 * K
        skilled.faults = []
        assert evaluate(config, url, folders[:1], *settings) == 0
    assert len(file.read_text().splitlines()) == 24 * K


async def as_it_is(request, answer):
    """No fault: the answer as it is."""
    return web.json_response(answer)


def test_other_settings_are_another_evaluation(config, folders, skilled, tmp_path, capsys):
    with skilled.running() as url:
        few = (f"data.eval={tmp_path / 'sums.jsonl'}", "evaluation.max_prompts=2")
        assert evaluate(config, url, folders[:1], *few) == 0
        assert evaluate(config, url, folders[:1], *few, "evaluation.temperature=0.5") == 2
        assert "another evaluation.temperature; give --force" in capsys.readouterr().err
        assert evaluate(config, url, folders[:1], *few, "evaluation.temperature=0.5", "--force") == 0
    assert data(tmp_path)["results"][0]["problems"] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--checkpoint", "nowhere"], "nowhere is neither a Hugging Face folder"),
        (["data.eval=null"], "data.eval: names no file"),
        (["data.eval=nowhere.jsonl"], "no data file nowhere.jsonl"),
        (["model.path=nowhere"], "model.path: nowhere is not"),
        (["data.eval={a: 3}"], "data.eval.a: 3 is not"),
    ],
)
def test_faults_before_any_server(config, capsys, arguments, words):
    assert main(["eval", str(config), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_unjudged_attempts_count_apart():
    def attempt(reward):
        return Attempt("p", 10, True, reward, "rule" if reward is not None else "unknown", "1")

    found = results([[attempt(1.0), attempt(None)], [attempt(0.0), attempt(0.0)], [attempt(None), attempt(None)]])
    assert found.scores == [1.0, 0.0, None] and found.accuracy.value == 0.5 and found.unjudged == 0.5
    assert found.pass_at[2].value == 0.0  # of the one problem with two judged attempts
    with pytest.raises(ValueError, match="not one response"):
        results([[attempt(None)]])


def test_thinking_that_the_template_opens_and_nobody_ends_is_no_answer(config, folders, skilled, tmp_path, capsys):
    """The response holds no <think>, since the prompt does; its box is inside the thinking all the same."""
    thinking = tmp_path / "thinking"
    shutil.copytree(folders[1], thinking)
    template = thinking / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant\n", "assistant\n<think>\n"))
    settings = (f"model.path={thinking}", f"data.eval={tmp_path / 'sums.jsonl'}", "evaluation.max_prompts=4")
    with skilled.running() as url:
        assert evaluate(config, url, [thinking], *settings) == 0
    file = tmp_path / "run" / "evaluation" / "responses" / "thinking" / "sums.jsonl"
    attempts = [json.loads(line) for line in file.read_text().splitlines()]
    assert {attempt["by"] for attempt in attempts} == {"no_answer"}
    assert attempts[0]["response"].startswith("<think>So it is \\boxed{")  # as it was judged
