"""Every layout of the Hugging Face repositories, from look-alike files, and both file formats."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ulorl_megatron.cli import main
from ulorl_megatron.data.files import read_rows, write_parquet
from ulorl_megatron.data.layouts import Dropped, read_layout
from ulorl_megatron.errors import UserError

FILES = Path(__file__).parent / "layouts"


def read(name, layout):
    return [outcome for _, outcome in read_layout(FILES / name, layout)]


@pytest.mark.parametrize(
    ("name", "layout", "answers"),
    [
        ("gsm8k.jsonl", "gsm8k", ["36", "5000", None]),
        ("math500.jsonl", "math", [r"\frac{11}{12}"]),
        ("math.json", "math", [r"\begin{pmatrix} 2 & 5 \\ 3 & 7 \end{pmatrix}"]),
        ("deepscaler.json", "deepscaler", ["53", "1", "8"]),
        ("aime_maxwell.jsonl", "aime", ["60"]),
        ("aime_h4.jsonl", "aime", ["1"]),
        ("aime_boxed.jsonl", "aime", ["45"]),
        ("aime_opencompass.jsonl", "aime", ["820", "90"]),
        ("beyond_aime.jsonl", "beyond_aime", ["512"]),
        ("dapo.jsonl", "dapo", ["15", "120"] * 3),
    ],
)
def test_answers_of_each_layout(name, layout, answers):
    rows = read(name, layout)
    assert [None if isinstance(row, Dropped) else row["answer"] for row in rows] == answers
    for number, row in enumerate(rows, start=1):
        assert isinstance(row, Dropped) or row["origin"] == f"{FILES / name}:{number}"


def test_what_is_around_a_problem_goes():
    prompt = read("dapo.jsonl", "dapo")[0]["prompt"]
    assert prompt == "Find the sum of all positive integers $n$ such that $n^2 - 10n + 21 < 0$."
    assert read("gsm8k.jsonl", "gsm8k")[0]["solution"].endswith("She earns 12*3 = $36.")
    assert read("gsm8k.jsonl", "gsm8k")[2] == Dropped("no answer after ####")


def test_a_row_of_another_layout_is_named(tmp_path):
    with pytest.raises(UserError, match=r"gsm8k\.jsonl:1: not a row of layout deepscaler .*'question', 'answer'"):
        read("gsm8k.jsonl", "deepscaler")
    file = tmp_path / "rows.jsonl"
    message = {"prompt": [{"role": "user"}], "answer": "1"}
    for wrong in ({"prompt": "1+1", "answer": True}, {"prompt": 3, "answer": "2"}, message):
        file.write_text('{"prompt": "1+1", "answer": "2"}\n' + json.dumps(wrong))
        with pytest.raises(UserError, match=r"rows\.jsonl:2: not a row of layout rows"):
            list(read_layout(file, "rows"))


def test_what_one_row_lacks_drops_that_row(tmp_path):
    rows = [{"prompt": " ", "answer": "1"}, {"prompt": None, "answer": "1"}, {"prompt": "q", "answer": None}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reasons = [outcome.reason for _, outcome in read_layout(file, "rows")]
    assert reasons == ["no question", "no question", "no answer"]


def test_a_folder_is_read_file_by_file(tmp_path):
    for i, folder in enumerate(("b", "a")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "1.json").write_text(json.dumps({"problem": f"p{i}", "solution": r"\boxed{1}"}))
    assert [row["prompt"] for _, row in read_layout(tmp_path, "math")] == ["p1", "p0"]
    (tmp_path / "c").mkdir()
    with pytest.raises(UserError, match="no file that ends in"):
        list(read_layout(tmp_path / "c", "math"))


def test_convert_writes_both_formats_whole(tmp_path, capsys):
    for name in ("a.jsonl", "a.parquet"):
        out = tmp_path / "sub" / name
        command = ["data", "convert", str(FILES / "gsm8k.jsonl"), "--layout", "gsm8k", "--out", str(out)]
        assert main(command) == 0
        rows = [row for _, row in read_rows(out)]
        assert [row["answer"] for row in rows] == ["36", "5000"]
        (dropped,) = (row for _, row in read_rows(out.with_name(name + ".dropped.jsonl")))
        assert dropped["reason"] == "no answer after ####" and dropped["row"]["question"].startswith("How many wheels")
        before = out.read_bytes()
        assert main(command) == 2 and "--force" in capsys.readouterr().err and out.read_bytes() == before
        assert main([*command, "--force"]) == 0
    assert sorted(path.name for path in (tmp_path / "sub").iterdir()) == [
        *("a.jsonl", "a.jsonl.dropped.jsonl", "a.parquet", "a.parquet.dropped.jsonl")
    ]
    # The layouts' own Parquet files, with messages in lists of structs, are read as the JSONL ones.
    table = pa.Table.from_pylist([row for _, row in read_rows(FILES / "dapo.jsonl")])
    pq.write_table(table, tmp_path / "dapo.parquet")
    rows = [row for _, row in read_layout(tmp_path / "dapo.parquet", "dapo")]
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in read("dapo.jsonl", "dapo")]


def test_parquet_needs_one_type_a_column(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": [{"role": "user", "content": "a"}], "answer": "1"}\n')
    with pytest.raises(UserError, match="several types"):
        write_parquet(tmp_path / "a.parquet", file)
    assert not list(tmp_path.glob("*.parquet*"))
    file.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "2", "solved": "1/8"}\n')
    write_parquet(tmp_path / "a.parquet", file)
    assert [row for _, row in read_rows(tmp_path / "a.parquet")][0]["solved"] is None


@pytest.mark.parametrize(("name", "content"), [("a.parquet", b"PAR1"), ("a.json", b"{"), ("a.jsonl", b"\xff\xfe")])
def test_broken_files_are_named(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=name):
        list(read_rows(tmp_path / name))
