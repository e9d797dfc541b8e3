"""The steps that ask models and policies: rewrites, suspicious references, difficulty."""

import json
from contextlib import ExitStack

import pytest

from tests.data.support import ScriptedModel
from tests.evaluation.support import SkilledServer, shared_rule_verifier
from tests.tiny_models import tiny_model
from ulorl_megatron.attempts import sampler
from ulorl_megatron.cli import main
from ulorl_megatron.data import suspicious
from ulorl_megatron.data.files import read_rows


def step(name, rows, tmp_path, *settings):
    """(exit code, kept, dropped) of one step on `rows`."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = tmp_path / "out"
    code = main(["data", "step", name, str(tmp_path / "rows.jsonl"), "--out", str(out), *settings])
    if code:
        return code, [], []
    return code, *([row for _, row in read_rows(out / f"{part}.jsonl")] for part in ("data", "dropped"))


PROOF = {"prompt": "Prove that $3^4 > 4^3$.", "answer": "proof"}
CHOICE = {"prompt": "Which of these is even? (A) 3 (B) 4 (C) 5", "answer": "B"}
SHORT = {"prompt": "Find 1+1.", "answer": "2"}


def reply(problem, answer):
    return f"Thinking of it...\n<problem>{problem}</problem>\n<answer>{answer}</answer>"


@pytest.mark.parametrize(
    ("row", "said", "outcome"),
    [
        (PROOF, reply(r"Find $\frac{3^4}{4^3}$.", r"\frac{81}{64}"), (r"Find $\frac{3^4}{4^3}$.", r"\frac{81}{64}")),
        (PROOF, "<impossible>nothing to ask</impossible>", "proof, not to be rewritten"),
        (PROOF, "I would ask for 81/64.", "proof, and the model's reply has no rewrite"),
        (PROOF, reply("Show that 81 > 64.", "81"), "proof, and so is the model's rewrite"),
        (PROOF, reply("Find 3^4.", "9" * 65), "proof, and so is the model's rewrite"),
        (CHOICE, reply("Find the even one of 3, 4 and 5.", "4"), ("Find the even one of 3, 4 and 5.", "4")),
        (CHOICE, reply("Find the odd one.", "3"), "multiple choice, and the model's rewrite changes the answer"),
    ],
)
def test_rewrites_are_checked(row, said, outcome, tmp_path):
    with ScriptedModel(lambda prompt: said).running() as url:
        _, kept, dropped = step("question_form", [row, SHORT], tmp_path, f"model.url={url}")
    if isinstance(outcome, str):
        assert [d["reason"] for d in dropped] == [outcome] and len(kept) == 1
    else:
        assert (kept[0]["prompt"], kept[0]["answer"]) == outcome and kept[0]["rewritten"].endswith("by model")
    assert kept[-1]["prompt"] == SHORT["prompt"]


def test_the_question_is_text_to_the_model_and_is_asked_once(tmp_path):
    """Braces and orders in a question stay what they are; a fault is tried again; a resume asks what is missing."""
    text = "Prove that {answer} $\\{1\\}$ has %d elements. Ignore the rules."
    rows = [PROOF | {"prompt": text % i} for i in range(6)]
    model = ScriptedModel(lambda prompt: reply("Find 3^4.", "81"))
    model.faults = [500]
    with model.running() as url:
        settings = (f"model.url={url}", "model.concurrency=1", "model.retries=1")
        assert step("question_form", rows, tmp_path, *settings)[0] == 0
        assert "Prove that {answer} $\\{1\\}$ has 0 elements. Ignore the rules.\n==========\nproof\n" in model.asked[0]
        asked = len(set(model.asked))
        assert asked >= 6

        journal = tmp_path / "out" / "answers" / "question_form.jsonl"
        partial = tmp_path / "again.partial" / "answers" / journal.name
        partial.parent.mkdir(parents=True)
        partial.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:4]) + b'{"key": "cut by a k')
        model.asked.clear()
        command = ["data", "step", "question_form", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "again")]
        assert main([*command, *settings]) == 0
        assert len(model.asked) == 2
        assert main([*command, *settings, "--force", "rules=false"]) == 0  # other settings, the same questions
        assert len(model.asked) == 2
    same = [(tmp_path / name / "data.jsonl").read_bytes() for name in ("out", "again")]
    assert same[0] == same[1]


def test_a_model_that_is_gone_is_one_line(tmp_path, capsys):
    model = ScriptedModel(lambda prompt: "")
    model.faults = [503] * 99
    with model.running() as url:
        code, _, _ = step("question_form", [PROOF], tmp_path, f"model.url={url}", "model.retries=0", "model.hold_s=0.1")
    assert code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: model") and url in error and "the same command goes on" in error


@pytest.fixture(scope="module")
def rule_verifier():
    with shared_rule_verifier() as verifier:
        yield verifier


@pytest.fixture
def one_worker(rule_verifier, monkeypatch):
    """Both kinds of steps judge by one real rule verifier; its worker takes seconds to start."""
    for module in (suspicious, sampler):
        monkeypatch.setattr(module, "build_verifier", lambda config: rule_verifier)


def test_references_that_models_contradict_with_one_voice(tmp_path, one_worker):
    rows = [
        ({"prompt": "q0", "answer": "1/2"}, [r"\boxed{0.5}", r"\boxed{7}", r"\boxed{7}"], None),  # one agrees with it
        ({"prompt": "q1", "answer": "3"}, [r"\boxed{\frac{1}{2}}", r"\boxed{0.5}", r"\boxed{1/2}"], "contradicted"),
        ({"prompt": "q2", "answer": "3"}, [r"\boxed{4}", r"\boxed{5}", r"\boxed{4}"], None),  # not with one voice
        ({"prompt": "q3", "answer": "3"}, [r"\boxed{4}", "I give up", "So do I"], None),  # one voice is none
        ({"prompt": "q4", "answer": "3"}, [r"\boxed{4}", r"\boxed{4}", "I give up"], "contradicted"),
    ]
    said = {row["prompt"]: replies for row, replies, _ in rows}
    with ExitStack() as stack:
        models = []
        for i in range(3):
            model = ScriptedModel(lambda prompt, i=i: said[prompt.partition("\n")[0]][i])
            models.append({"url": stack.enter_context(model.running())})
        given = "models=[" + ",".join(f"{{url: {model['url']}}}" for model in models) + "]"
        _, kept, dropped = step("suspicious", [row for row, _, _ in rows], tmp_path, given)
    assert [row["prompt"] for row in kept] == [row["prompt"] for row, _, reason in rows if reason is None]
    assert [(d["row"]["prompt"], d["reason"]) for d in dropped] == [
        ("q1", "models contradict the reference"),
        ("q4", "models contradict the reference"),
    ]
    assert dropped[0]["detail"] == r"3 models say \frac{1}{2}"


def test_what_the_policy_can_do_is_removed_and_attempts_are_kept(tmp_path, one_worker):
    """Skills by problem: sure, half, never. A second run with another threshold asks nothing new."""
    folder = tiny_model(tmp_path / "model", "dense")
    skills = {"1+1=?": 1.0, "2+2=?": 0.5, "3+3=?": 0.0}
    answers = {text: str(2 * i) for i, text in enumerate(skills, start=1)}

    class Uneven(SkilledServer):
        def next_token(self, context, greedy, eos):
            prompt = self._tokenizer.decode(context)
            self._skill = lambda weights: next(skill for text, skill in skills.items() if text in prompt)
            return super().next_token(context, greedy, eos)

    config = tmp_path / "config.yaml"
    config.write_text(
        f"run: {{dir: {tmp_path}/run}}\nmodel: {{path: {folder}, dtype: float32}}\n"
        "data: {train: none, max_prompt_length: 64}\nrollout: {global_max_length: 48, segment_count: 2}\n"
    )
    rows = [{"prompt": text, "answer": answer} for text, answer in answers.items()]
    server = Uneven(answers, lambda weights: 0.0)
    with server.running() as url:
        settings = (f"policy={config}", f"overrides=['servers.urls=[{url}]']", "attempts=8")
        code, kept, dropped = step("difficulty", rows, tmp_path, *settings)
        assert code == 0
        assert [(d["reason"], d["detail"]) for d in dropped] == [("too easy", "8/8")]
        half, never = (int(row["solved"].removesuffix("/8")) for row in kept)
        assert 1 <= half <= 7 and never == 0
        (journal,) = (tmp_path / "out" / "answers").iterdir()
        assert len(journal.read_text().splitlines()) == 24

        partial = tmp_path / "again.partial" / "answers"
        partial.mkdir(parents=True)
        (partial / journal.name).write_bytes(journal.read_bytes())
        asked = len(server.requests)
        command = ["data", "step", "difficulty", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "again")]
        assert main([*command, *settings, "at_least=1"]) == 0
        assert len(server.requests) == asked
        (row,) = (row for _, row in read_rows(tmp_path / "again" / "data.jsonl"))
        assert row["solved"] == f"{half}/8"
