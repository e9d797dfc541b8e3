"""The command line: every fault a person can make is one message, exit code 2, and nothing written."""

import json
import os
import socket
import subprocess
import sys

import pytest

from tests.tiny_models import tiny_model
from ulorl_megatron.cli import main
from ulorl_megatron.launch import FOLLOWER_EXIT


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
    file.write_text(
        f"run: {{dir: {tmp_path}/run}}\nmodel: {{path: {model}}}\ndata: {{train: {data}, max_prompt_length: 64}}\n"
        "rollout: {global_max_length: 1024}\n"
    )
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
        ("policy.parallel.tensor=2", "does not divide 1 ranks"),
    ],
)
def test_train_refuses_before_it_writes(config, capsys, tmp_path, override, words):
    assert words in fails(capsys, "train", config, override)
    assert not (tmp_path / "run").exists()


def test_faults_against_the_model_have_a_line_each(config, capsys):
    layout = ["policy.parallel.tensor=4", "policy.parallel.expert=3", "rollout.global_max_length=4096"]
    text = fails(capsys, "config", config, "run.processes=12", *layout)
    assert len(text.splitlines()) == 4
    assert "key-value heads" in text and "8 experts" in text and "the model has 2048" in text
    assert main(["config", str(config), "run.processes=4", "policy.parallel.expert=4"]) == 0


def test_more_ranks_than_gpus(config, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert "4 ranks, but this machine has 2 GPUs" in fails(capsys, "train", config, "run.processes=4")


def test_the_launchers_ranks_count(config, tmp_path):
    """torchrun's, or Slurm's, whatever run.processes says; rank 0 tells, and no rank waits for another."""
    command = [sys.executable, "-m", "ulorl_megatron.cli", "train", str(config), "run.processes=3"]
    common = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    ranks = [
        subprocess.Popen(
            [*command, "policy.parallel.expert=3"],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=120)[1] for process in ranks]
    assert [process.returncode for process in ranks] == [2, FOLLOWER_EXIT]
    assert "does not divide 2 ranks" in errors[0] and "expert = 3 does not divide 8 experts" in errors[0]
    assert errors[1] == "" and not (tmp_path / "run").exists()


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
