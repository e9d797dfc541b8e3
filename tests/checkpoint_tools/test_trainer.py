"""Converted checkpoints against the trainer's model, and the trainer's own checkpoints exported."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from transformers import AutoModelForCausalLM

from checkpoint_tools.report import inspect_lines
from checkpoint_tools.sources import open_checkpoint
from tests.checkpoint_tools.support import assert_bit_equal, tensors, to_hf, to_megatron
from tests.policy.support import make_samples, objective, policy_config
from ulorl_megatron.policy import Policy
from ulorl_megatron.policy.packing import pack_lengths


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    """A process group of this process alone, left to the process's end: Megatron's groups hang on it."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.mark.parametrize("kind", ["moe", "dense", "tied"])
def test_logits_of_the_converted_model_equal_transformers(pristine, tmp_path, kind):
    policy = Policy(policy_config(pristine(kind), tmp_path / "run"))
    (model,) = policy._models
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    checkpoint = to_megatron(pristine(kind), tmp_path / "m")
    model.load_state_dict(dist_checkpointing.load({"model": model.sharded_state_dict()}, str(checkpoint))["model"])
    ids = torch.arange(3, 90)
    with torch.no_grad():
        pack = pack_lengths([len(ids)], torch.device("cpu"))
        ours = model(ids[None], torch.arange(len(ids))[None], None, packed_seq_params=pack)[0]
        theirs = AutoModelForCausalLM.from_pretrained(pristine(kind), dtype=torch.float32)(ids[None]).logits[0]
    assert (ours - theirs).abs().max() < 1e-5


def test_a_checkpoint_of_the_trainer_is_exported(pristine, tmp_path):
    """With optimizer state and counters beside the model, as `ulorl train` leaves it in a run directory."""
    config = policy_config(pristine("moe"), tmp_path / "run")
    policy = Policy(config)
    policy.update(make_samples(), objective())
    policy.save(7)
    (checkpoint,) = Path(config.run.dir, "checkpoints").glob("step-*")
    assert "iteration    7" in list(inspect_lines(checkpoint, pristine("moe"), tensors=False))
    exported = to_hf(checkpoint, tmp_path / "hf", pristine("moe"))
    assert_bit_equal(tensors(exported), dict(policy.hf_tensors()))
    assert open_checkpoint(exported).arch == open_checkpoint(pristine("moe")).arch
