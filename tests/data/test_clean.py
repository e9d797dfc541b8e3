"""Pipelines: what they leave behind, resuming, refusing, reproducing, faults in the file."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_models import tiny_tokenizer
from ulorl_megatron.cli import main
from ulorl_megatron.data import PromptSet, clean
from ulorl_megatron.data.files import read_rows
from ulorl_megatron.data.steps import STEPS

FILES = Path(__file__).parent / "layouts"

ROWS = [
    {"prompt": "What is 6 times 7?", "answer": "42"},
    {"prompt": "What is 6 times 7 ?", "answer": "42"},
    {"prompt": "Write 1/3 to a hundred places.", "answer": "0." + "3" * 100},
    {"prompt": "(a) Find 1+1. (b) Find 2+2.", "answer": "2, 4"},
    {"prompt": "Find 1+1.", "answer": "Adding gives 2.\nThe answer is \\boxed{2}."},
    {"prompt": "Find 1+2.", "answer": "One and two\nmake three."},
    {"prompt": "Find the identity of order 2.", "answer": r"\begin{pmatrix} 1 & 0 \\ 0 & 1 \end{pmatrix}"},
    {"prompt": "Is 7 prime?", "answer": "yes"},
    {"prompt": "What is 2+3? (A) 4 (B) 5 (C) 6", "answer": "B"},
    {"prompt": "x" * 300 + " What is x?", "answer": "1"},
    {"prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Find 3+3."}], "answer": "6"},
]
STEPS_OF = """
  - short_answer
  - answer_form
  - sub_questions
  - question_form
  - exact_duplicates
  - near_duplicates: {threshold: 0.9}
  - overlap: {sets: [{path: EVAL, layout: beyond_aime}]}
  - instruction: {text: Put it in a box.}
  - prompt_length: {model: MODEL, max_tokens: 200}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def pipeline(tmp_path, model):
    def write(name, rows):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    write("rows.jsonl", ROWS)
    write("eval.jsonl", [{"problem": "How many moons has Mars?", "answer": 2}])
    file = tmp_path / "pipeline.yaml"
    steps = STEPS_OF.replace("MODEL", str(model)).replace("EVAL", str(tmp_path / "eval.jsonl"))
    file.write_text(f"out: {tmp_path}/clean\ninputs:\n  - {{path: {tmp_path}/rows.jsonl}}\nsteps:{steps}")
    return file


def run(pipeline, *arguments):
    return main(["data", "clean", str(pipeline), *arguments])


def rows_of(file):
    return [row for _, row in read_rows(file)]


def test_every_row_is_kept_or_dropped_with_its_reason(pipeline, tmp_path, capsys):
    assert run(pipeline) == 0
    out = tmp_path / "clean"
    assert sorted(path.name for path in out.iterdir()) == ["data.jsonl", "dropped.jsonl", "manifest.json", "report.md"]
    kept, dropped = rows_of(out / "data.jsonl"), rows_of(out / "dropped.jsonl")
    assert [(row["prompt"], row["answer"]) for row in kept[:-1]] == [
        ("What is 6 times 7?\n\nPut it in a box.", "42"),
        ("Find 1+1.\n\nPut it in a box.", "2"),
        ("What is 2+3?\n\nPut it in a box.", "5"),
    ]
    system, question = kept[-1]["prompt"]
    assert system["content"] == "Be brief." and question["content"] == "Find 3+3.\n\nPut it in a box."
    assert [(d["step"], d["reason"]) for d in dropped] == [
        ("short_answer", "no final answer in the worked reference"),
        ("answer_form", "answer too long"),
        ("answer_form", "matrix as the answer"),
        ("sub_questions", "several sub-questions"),
        ("question_form", "true or false"),
        ("exact_duplicates", "duplicate"),
        ("prompt_length", "prompt too long"),
    ]
    assert len(kept) + len(dropped) == len(ROWS)
    assert {row["origin"] for row in kept} | {d["row"]["origin"] for d in dropped} == {
        f"{tmp_path}/rows.jsonl:{i}" for i in range(1, len(ROWS) + 1)
    }
    assert len(PromptSet(str(out / "data.jsonl"), tiny_tokenizer(), 200, seed=0)) == len(kept)

    report, printed = (out / "report.md").read_text(), capsys.readouterr().out
    assert "| answer_form | 10 | 8 | 0 | 2 |" in report and "### dropped: matrix as the answer (1)" in report
    assert "became What is 2+3? **5**" in report and "dropped 2: answer too long 1, matrix as the answer 1" in printed
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["outputs"]["data.jsonl"] == hashlib.sha256((out / "data.jsonl").read_bytes()).hexdigest()
    read, *steps = manifest["steps"]
    assert read["files"][f"{tmp_path}/rows.jsonl"] == hashlib.sha256((tmp_path / "rows.jsonl").read_bytes()).hexdigest()
    assert [step["name"] for step in steps] == [next(iter(item)) for item in manifest["pipeline"]["steps"]]
    assert "tokenizer.json" in " ".join(steps[-1]["files"]) and manifest["versions"]["datasketch"]


def test_the_same_pipeline_makes_the_same_files(pipeline, tmp_path):
    assert run(pipeline) == 0
    before = {path.name: path.read_bytes() for path in (tmp_path / "clean").iterdir()}
    assert run(pipeline) == 2  # it is there
    assert run(pipeline, "--force") == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "clean").iterdir()} == before


def test_nothing_that_is_not_ours_is_replaced(pipeline, tmp_path, capsys):
    (tmp_path / "clean").mkdir()
    (tmp_path / "clean" / "thesis.tex").write_text("!")
    assert run(pipeline, "--force") == 2
    assert "was not made by ulorl data" in capsys.readouterr().err and (tmp_path / "clean" / "thesis.tex").exists()


def test_a_kill_costs_the_step_in_work_only(pipeline, tmp_path, monkeypatch, capsys):
    """Killed in a step, the same command runs that one again and those behind it; with other settings, from there."""
    ran = []
    for name, kind in STEPS.items():
        original = kind.run

        def counted(self, rows, work, name=name, original=original):
            ran.append(name)
            return original(self, rows, work)

        monkeypatch.setattr(kind, "run", counted)

    def dies(self, rows, work):
        yield from [(row, row) for row in list(rows)[:2]]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(STEPS["exact_duplicates"], "run", dies)
        assert run(pipeline) == 130
    assert ran == ["short_answer", "answer_form", "sub_questions", "question_form"]
    assert not (tmp_path / "clean").exists()
    ran.clear()
    assert run(pipeline) == 0
    assert ran == ["exact_duplicates", "near_duplicates", "overlap", "instruction", "prompt_length"]
    resumed = (tmp_path / "clean" / "data.jsonl").read_bytes()
    assert not (tmp_path / "clean.partial").exists()
    assert run(pipeline, "--force") == 0 and (tmp_path / "clean" / "data.jsonl").read_bytes() == resumed


def test_a_changed_input_or_setting_is_not_taken_for_done(pipeline, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(clean, "_publish", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run(pipeline) == 130  # all steps are done
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"prompt": "Find 5+5.", "answer": "10"}\n')
    assert run(pipeline, "steps[7]={instruction: {text: Think.}}") == 0
    kept = rows_of(tmp_path / "clean" / "data.jsonl")
    assert kept[-1]["prompt"] == "Find 5+5.\n\nThink." and kept[0]["prompt"].endswith("Think.")


def test_parquet_in_and_out(pipeline, tmp_path):
    assert run(pipeline, "format=parquet", f"inputs=[{{path: {FILES}/gsm8k.jsonl, layout: gsm8k}}]") == 0
    data = tmp_path / "clean" / "data.parquet"
    assert [row["answer"] for row in rows_of(data)] == ["36", "5000"]
    prompts = PromptSet(str(data), tiny_tokenizer(), 200, seed=0)
    assert [prompt.answer for prompt in prompts.first(9)] == ["36", "5000"]


def test_two_at_once_are_refused(pipeline, tmp_path, capsys):
    program = f"""
import fcntl, sys
from pathlib import Path
folder = Path({str(tmp_path / "clean.partial")!r}); folder.mkdir()
lock = (folder / "lock").open("w"); fcntl.flock(lock, fcntl.LOCK_EX)
print("held", flush=True); sys.stdin.read()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdin=-1, stdout=-1, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        assert run(pipeline) == 2
        assert "another process is writing there" in capsys.readouterr().err
        holder.stdin.close()
    assert run(pipeline) == 0


def test_no_row_left_is_an_error(pipeline, tmp_path, capsys):
    assert run(pipeline, "steps=[{answer_form: {max_characters: 0}}]") == 2
    assert "no row is left" in capsys.readouterr().err and not (tmp_path / "clean").exists()
    assert (tmp_path / "clean.partial" / "01-answer_form.dropped.jsonl").exists()


def test_one_step_by_itself(tmp_path, pipeline):
    rows, out = str(tmp_path / "rows.jsonl"), tmp_path / "one"
    assert main(["data", "step", "answer_form", rows, "--out", str(out), "max_characters=20", "matrices=true"]) == 0
    assert len(rows_of(out / "data.jsonl")) == len(ROWS) - 4


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("steps=[answer_from]", "steps[0]: 'answer_from': unknown step, did you mean answer_form?"),
        ("steps=[{answer_form: {max_chars: 3}}]", "steps[0]: answer_form: Key 'max_chars'"),
        ("steps=[{answer_form: {max_characters: many}}]", "steps[0]: answer_form: Value 'many'"),
        ("steps=[prompt_length]", "steps[0]: prompt_length: no value given for model"),
        ("steps=[{prompt_length: {model: nowhere}}]", "prompt_length.model: no folder nowhere"),
        ("steps=[{suspicious: {models: [{url: u}]}}]", "suspicious.models: 1 given"),
        ("steps=[[1]]", "neither a name nor one name with its settings"),
        ("format=csv", "format: 'csv'"),
        ("inputs=[]", "inputs: none given"),
        ("inputs=[{path: nowhere, layout: row}]", "inputs[0].layout: 'row', did you mean rows?"),
        ("input=1", "Key 'input'"),
    ],
)
def test_faults_of_the_file_are_told_before_anything_runs(pipeline, tmp_path, capsys, override, words):
    assert run(pipeline, override) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "clean.partial").exists()
