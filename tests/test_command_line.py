"""The command line: every fault a person can make is one message, exit code 2, and nothing written."""

import json
import socket

import pytest

from tests.tiny_models import tiny_model
from ulorl_megatron.cli import main


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("cli") / "model"
    tiny_model(path)
    return path


@pytest.fixture
def config(tmp_path, model):
    data = tmp_path / "train.jsonl"
    data.write_text(json.dumps({"prompt": "1+1", "answer": "2"}) + "\n")
    file = tmp_path / "config.yaml"
    file.write_text(f"run: {{dir: {tmp_path}/run}}\nmodel: {{path: {model}}}\ndata: {{train: {data}}}\n")
    return file


def fails(capsys, *arguments):
    assert main([str(a) for a in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.out == ""
    return captured.err


def test_config_prints_what_it_resolved(config, capsys):
    assert main(["config", str(config), "rollout.segment_count=4"]) == 0
    assert "segment_count: 4" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["train", "config"])
def test_unknown_key_and_wrong_type(config, capsys, command):
    text = fails(capsys, command, config, "rollout.segments=4", "run.seed=many")
    assert "rollout.segments: unknown key, did you mean rollout.segment_count?" in text and "run.seed" in text


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.path=nowhere", "nowhere"),
        ("data.train=nowhere.jsonl", "nowhere.jsonl"),
        ("rollout.top_p=0.9", "rollout.top_p"),
        ("rollout.temperature=0", "rollout.temperature"),
    ],
)
def test_train_refuses_before_it_writes(config, capsys, tmp_path, override, words):
    assert words in fails(capsys, "train", config, override)
    assert not (tmp_path / "run").exists()


def test_port_in_use(config, capsys, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"port {port}" in fails(capsys, "train", config, f"servers.port={port}")
    assert not (tmp_path / "run").exists()


def test_row_without_answer_names_file_and_line(config, capfd, tmp_path):
    data = tmp_path / "train.jsonl"
    data.write_text(data.read_text() + json.dumps({"prompt": "1+2"}) + "\n")
    assert main(["train", str(config), "run.processes=2"]) == 2
    errors = capfd.readouterr().err
    assert f"{data}:2" in errors and "answer" in errors and "Traceback" not in errors
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["logs"]


def test_nothing_to_do_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2
