"""The run directory, and which changes of the configuration a resumed run may have."""

import pytest
import yaml

from tests.conftest import tiny_config
from ulorl_megatron.config import to_yaml
from ulorl_megatron.config.schema import Importance
from ulorl_megatron.errors import UserError
from ulorl_megatron.monitor import finished
from ulorl_megatron.monitor.run_directory import open_run_directory


@pytest.fixture
def config(tmp_path):
    config = tiny_config(tmp_path / "run", tmp_path / "model")
    config.data.train = "train.jsonl"
    return config


def add_checkpoint(folder):
    (folder / "checkpoints" / "latest").write_text("step-000001\n")


def test_layout(config, tmp_path):
    folder = open_run_directory(config)
    assert folder == tmp_path / "run"
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.yaml", "checkpoints", "tensorboard", "logs", "weights"}
    assert (folder / "config.yaml").read_text() == to_yaml(config)


def test_the_same_configuration_resumes(config):
    folder = open_run_directory(config)
    add_checkpoint(folder)
    (folder / "logs" / "server-0.log").write_text("kept")
    open_run_directory(config)
    assert (folder / "logs" / "server-0.log").read_text() == "kept"


def test_a_run_that_is_done_says_so(config, capsys):
    config.run.total_steps = 1
    assert not finished(config)
    add_checkpoint(open_run_directory(config))
    assert finished(config) and "is done: 1 of 1 steps" in capsys.readouterr().out
    config.run.total_steps = 2
    assert not finished(config), "it goes on"
    config.run.total_steps, config.run.seed = 1, 5
    with pytest.raises(UserError, match="run.seed"):
        finished(config)


def test_every_key_that_differs_is_named_and_nothing_changed(config):
    folder = open_run_directory(config)
    add_checkpoint(folder)
    before = (folder / "config.yaml").read_text()
    config.algorithm.importance = Importance.sais
    config.policy.optimizer.lr = 0.5
    config.run.total_steps = 7
    with pytest.raises(UserError) as error:
        open_run_directory(config)
    lines = str(error.value).splitlines()
    assert lines[1:-1] == [
        "  algorithm.importance: pois then, sais now",
        "  policy.optimizer.lr: 1e-06 then, 0.5 now",
    ]
    assert str(folder) in lines[0]
    assert (folder / "config.yaml").read_text() == before


def test_what_does_not_change_the_result_may_change(config):
    folder = open_run_directory(config)
    add_checkpoint(folder)
    config.run.total_steps = 999
    config.servers.urls = ["http://elsewhere:1"]
    config.verifier.workers = 9
    config.checkpoint.every = 5
    config.policy.parallel.expert = 2
    config.run.processes = 2
    config.evaluation.every = 3
    config.data.eval = "heldout.jsonl"
    open_run_directory(config)
    assert yaml.safe_load((folder / "config.yaml").read_text())["run"]["total_steps"] == 999


def test_a_moved_run_directory_resumes(config, tmp_path):
    folder = open_run_directory(config)
    add_checkpoint(folder)
    folder.rename(tmp_path / "moved")
    config.run.dir = str(tmp_path / "moved")
    open_run_directory(config)


def test_a_run_that_failed_before_its_first_checkpoint_may_be_corrected(config):
    """A wrong data path is found after the directory is made; mending it must not need another run.dir."""
    open_run_directory(config)
    config.data.train = "the right file.jsonl"
    folder = open_run_directory(config)
    assert yaml.safe_load((folder / "config.yaml").read_text())["data"]["train"] == "the right file.jsonl"
