"""Checkpoints on one rank: written whole, pointed to last, resumed exactly."""

import errno
import functools
import subprocess
import sys
import threading

import pytest
import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from transformers import AutoTokenizer

from checkpoint_tools.cli import main as ckpt
from checkpoint_tools.sources import open_checkpoint
from tests.policy.support import hf_weights, make_samples, objective, policy_config
from ulorl_megatron.config.schema import Dtype
from ulorl_megatron.errors import UserError
from ulorl_megatron.policy import Policy


@pytest.fixture
def config(tiny, tmp_path):
    return policy_config(tiny(), tmp_path)


def test_resuming_goes_on_exactly(config):
    samples = make_samples()
    policy = Policy(config)
    assert policy.load_latest() is None
    for _ in range(2):
        policy.update(samples, objective())
    policy.save(7)
    expected = [policy.update(samples, objective()) for _ in range(2)]
    weights = hf_weights(policy)
    resumed = Policy(config)
    assert resumed.load_latest() == 7
    assert [resumed.update(samples, objective()) for _ in range(2)] == expected
    assert all(torch.equal(w, weights[name]) for name, w in hf_weights(resumed).items())


def test_a_checkpoint_before_the_first_update_resumes_too(config):
    """A step may release no sample, and is saved all the same."""
    samples = make_samples()
    policy = Policy(config)
    policy.save(1)
    expected = policy.update(samples, objective())
    resumed = Policy(config)
    assert resumed.load_latest() == 1
    assert resumed.update(samples, objective()) == expected


def test_only_complete_checkpoints_count_and_old_ones_go(config, tmp_path):
    policy = Policy(config)
    directory = tmp_path / "checkpoints"
    for step in (1, 2, 3):
        policy.save(step)
    assert sorted(p.name for p in directory.iterdir()) == ["latest", "step-000002", "step-000003"]
    (directory / ".step-000004.partial").mkdir()  # a kill while writing
    (directory / "step-000004").mkdir()  # and one before the pointer
    assert policy.load_latest() == 3
    policy.save(4)
    assert sorted(p.name for p in directory.iterdir()) == ["latest", "step-000003", "step-000004"]
    assert policy.load_latest() == 4


def test_a_pointer_that_leads_nowhere_is_told(config, tmp_path):
    policy = Policy(config)
    policy.save(1)
    (tmp_path / "checkpoints" / "latest").write_text("step-000009\n")
    with pytest.raises(UserError, match="step-000009, which is not a complete checkpoint"):
        policy.load_latest()


@pytest.fixture
def held_back(monkeypatch):
    """Writing starts when this event is set; every thread that writes waits for it."""
    go = threading.Event()
    write_item = filesystem_async._write_item

    @functools.wraps(write_item)
    def wait_and_write(*args, **kwargs):
        assert go.wait(60)
        return write_item(*args, **kwargs)

    monkeypatch.setattr(filesystem_async, "_write_item", wait_and_write)
    yield go
    go.set()


def exported(checkpoint, out):
    """The checkpoint's weights as HF tensors, by the converter, which is not told the model."""
    assert ckpt(["megatron-to-hf", str(checkpoint), str(out)]) == 0
    reader = open_checkpoint(out).reader
    return {name: reader.read(name) for name in reader.entries}


@pytest.mark.parametrize("dtype", Dtype)
def test_training_goes_on_while_a_checkpoint_is_written(config, held_back, tmp_path, dtype):
    """What is written is the state at the save, whatever training does to weights and moments meanwhile.

    The weights are looked at in the file: a resume would not show them in float32, being its own masters.
    """
    config.model.dtype = dtype
    config.checkpoint.asynchronous = True
    samples = make_samples()
    policy = Policy(config)
    policy.update(samples, objective())
    weights = hf_weights(policy)
    policy.save(1)
    expected = [policy.update(samples, objective()) for _ in range(2)]
    assert policy.settle_checkpoint(wait=False) is None
    assert policy.load_latest() is None
    held_back.set()
    assert policy.settle_checkpoint(wait=True) == 1
    assert policy.settle_checkpoint(wait=True) is None  # told once
    assert [p.name for p in sorted((tmp_path / "checkpoints").iterdir())] == ["latest", "step-000001"]
    in_file = exported(tmp_path / "checkpoints" / "step-000001", tmp_path / "hf")
    assert in_file.keys() == weights.keys()
    assert [name for name, weight in weights.items() if not torch.equal(in_file[name], weight)] == []
    resumed = Policy(config)
    assert resumed.load_latest() == 1
    assert [resumed.update(samples, objective()) for _ in range(2)] == expected


def test_the_next_save_waits_for_the_one_before(config, held_back, tmp_path):
    config.checkpoint.asynchronous = True
    policy = Policy(config)
    policy.save(1)
    threading.Timer(0.5, held_back.set).start()
    policy.save(2)
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step-000001\n"
    policy.save(3)
    policy.save(4)
    assert policy.settle_checkpoint(wait=True) == 3  # of those that are complete: 3 and 4
    assert policy.load_latest() == 4


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_checkpoint_that_cannot_be_written_ends_the_run(config, monkeypatch, tmp_path, asynchronous):
    config.checkpoint.asynchronous = asynchronous
    policy = Policy(config)
    policy.save(1)
    policy.settle_checkpoint(wait=True)

    @functools.wraps(filesystem_async._write_item)
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(filesystem_async, "_write_item", full)
        with pytest.raises(UserError, match="checkpoint of step 2 could not be written.*No space left"):
            policy.save(2)
            policy.settle_checkpoint(wait=True)
    assert policy.load_latest() == 1
    policy.save(3)  # the left-over is in nobody's way
    policy.settle_checkpoint(wait=True)
    assert policy.load_latest() == 3


def test_a_kill_while_writing_leaves_the_checkpoint_before(config, tmp_path):
    program = [sys.executable, "-m", "tests.policy.killed_while_writing", config.model.path, str(tmp_path)]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        directory = tmp_path / "checkpoints"
        written = sum(file.stat().st_size for file in directory.glob(".step-000002.partial/*"))
        process.kill()
    assert line == "updated after the save of step 2\n" and written > 0
    policy = Policy(config)
    assert policy.load_latest() == 1
    policy.save(2)
    assert sorted(p.name for p in directory.iterdir()) == ["latest", "step-000001", "step-000002"]


def test_a_checkpoint_is_exported_without_naming_the_model(config, tmp_path):
    policy = Policy(config)
    policy.update(make_samples(), objective())
    policy.save(1)
    weights = exported(tmp_path / "checkpoints" / "step-000001", tmp_path / "hf")
    expected = hf_weights(policy)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").eos_token == "<|eos|>"


def test_another_model_is_told_by_name_and_layout(config, tiny, tmp_path):
    Policy(config).save(1)
    config.model.path = str(tiny("dense"))
    with pytest.raises(UserError, match=r"(?s)step-000001 cannot be loaded.*saved by 1 rank, this.*model.path"):
        Policy(config).load_latest()


def test_offloaded_moments_are_saved_and_resumed(config):
    config.policy.optimizer.offload = True
    samples = make_samples()
    policy = Policy(config)
    policy.update(samples, objective())
    policy.save(1)
    expected = [policy.update(samples, objective()) for _ in range(2)]
    config.policy.optimizer.offload = False
    resumed = Policy(config)
    assert resumed.load_latest() == 1
    assert [resumed.update(samples, objective()) for _ in range(2)] == expected
