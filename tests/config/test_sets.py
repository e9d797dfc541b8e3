"""data.eval: one file, or several by name."""

import pytest

from ulorl_megatron.config import load, to_yaml
from ulorl_megatron.config.sets import evaluation_sets
from ulorl_megatron.errors import UserError


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("run: {dir: r}\nmodel: {path: m}\ndata: {train: t.jsonl, eval: sets/aime24.jsonl}\n")
    return str(path)


@pytest.mark.parametrize(
    ("overrides", "sets"),
    [
        ([], {"aime24": "sets/aime24.jsonl"}),
        (["data.eval=other.parquet"], {"other": "other.parquet"}),
        (["data.eval={a: x.jsonl, b: y.jsonl}"], {"a": "x.jsonl", "b": "y.jsonl"}),
        (["data.eval.only=x.jsonl"], {"only": "x.jsonl"}),
        (["data.eval=null"], {}),
    ],
)
def test_forms(file, tmp_path, overrides, sets):
    config = load(file, overrides)
    assert evaluation_sets(config.data) == sets
    (tmp_path / "again.yaml").write_text(to_yaml(config))
    assert load(str(tmp_path / "again.yaml")) == config


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.eval=3", "data.eval: 3 is neither"),
        ("data.eval=[a.jsonl]", "is neither a file nor names of files"),
        ("data.eval={a: 3}", "data.eval.a: 3 is not"),
        ("data.eval={a/b: x.jsonl}", "data.eval.a/b: a name is made of"),
    ],
)
def test_faults(file, override, words):
    with pytest.raises(UserError) as error:
        load(file, [override])
    assert words in str(error.value)
