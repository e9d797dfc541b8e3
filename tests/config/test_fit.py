"""A configuration against its model's config.json and the number of ranks: every fault, before anything starts."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from checkpoint_tools.architecture import Architecture
from checkpoint_tools.errors import ArchitectureError
from tests.checkpoint_tools.support import QWEN3_30B_A3B
from ulorl_megatron.config import fit, layout
from ulorl_megatron.config.fit import check_fit
from ulorl_megatron.config.schema import Config, ParallelConfig
from ulorl_megatron.errors import UserError

MOE = Architecture.from_hf(QWEN3_30B_A3B)  # 48 layers, 32 heads over 4 key-value heads, 128 experts of 768
DENSE = replace(MOE, model_type="qwen3", num_experts=None, experts_per_token=None, moe_intermediate_size=None)


@pytest.fixture
def config(tmp_path):
    """A configuration that fits a folder with a config.json of Qwen3-30B-A3B, and no weights."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    config = Config()
    config.model.path = str(tmp_path)
    config.rollout.global_max_length = 32768
    return config


@pytest.mark.parametrize(
    ("arch", "sizes", "world", "reason"),
    [
        (MOE, dict(tensor=2), 3, "tensor x pipeline x context = 2 does not divide 3 ranks"),
        (MOE, dict(context=3, pipeline=2), 8, "tensor x pipeline x context = 6 does not divide 8 ranks"),
        (MOE, dict(expert=8), 4, "expert x expert_tensor x pipeline = 8 does not divide 4 ranks"),
        (MOE, dict(expert=4, expert_tensor=4), 8, "expert x expert_tensor x pipeline = 16 does not divide 8 ranks"),
        (MOE, dict(expert=4, pipeline=4), 8, "expert x expert_tensor x pipeline = 16 does not divide 8 ranks"),
        (MOE, dict(tensor=64), 64, "tensor = 64 does not divide 32 attention heads"),
        (MOE, dict(tensor=8), 8, "tensor = 8 does not divide 4 key-value heads"),
        (MOE, dict(pipeline=5), 5, "pipeline x virtual_pipeline = 5 does not divide 48 layers"),
        (MOE, dict(pipeline=4, virtual_pipeline=5), 4, "pipeline x virtual_pipeline = 20 does not divide 48 layers"),
        (MOE, dict(expert=3), 3, "expert = 3 does not divide 128 experts"),
        (MOE, dict(expert_tensor=5), 5, "expert_tensor = 5 does not divide 768 expert hidden units"),
        (DENSE, dict(expert=2), 2, "the model has no experts"),
        (DENSE, dict(expert_tensor=2), 2, "the model has no experts"),
        (replace(DENSE, intermediate_size=6143), dict(tensor=2), 2, "tensor = 2 does not divide 6143 hidden units"),
        (replace(MOE, vocab_size=5), dict(tensor=4), 4, "tensor = 4 leaves a rank without any of the 5 words"),
    ],
)
def test_a_layout_that_cannot_work_has_one_reason(arch, sizes, world, reason):
    (found,) = [fault for fault in layout.faults(ParallelConfig(**sizes), arch, world) if reason in fault]
    assert found.startswith(reason)


@pytest.mark.parametrize(
    ("sizes", "world"),
    [
        (dict(), 1),
        (dict(context=8, expert=8), 32),
        (dict(tensor=4, context=2, expert=8), 32),  # experts over ranks that are tensor- and context-parallel elsewhere
        (dict(tensor=4, pipeline=4, virtual_pipeline=4, expert=4), 32),
        (dict(expert=2, expert_tensor=4), 8),
    ],
)
def test_a_layout_that_can_work_has_none(sizes, world):
    assert list(layout.faults(ParallelConfig(**sizes), MOE, world)) == []


def test_replicas_in_lockstep_are_those_that_share_a_group_of_experts():
    for sizes, replicas in (
        (dict(), 1),
        (dict(context=8, expert=8), 1),
        (dict(context=2, expert=8), 4),
        (dict(tensor=2, expert=2, expert_tensor=2), 2),
        (dict(tensor=4, expert=2), 1),
        (dict(tensor=2, context=3, expert=4), 2),  # groups of four over replicas of six: every other one starts level
    ):
        assert layout.lockstep_replicas(ParallelConfig(**sizes)) == replicas


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(num_experts_per_tok=129), "num_experts_per_tok 129 of 128 experts"),
        (dict(num_experts_per_tok=1), "gives the router no gradient"),
        (dict(head_dim=127), "head_dim 127 is odd"),
        (dict(rope_scaling={"rope_type": "linear", "factor": 2.0}), "rope scaling 'linear' is not supported"),
        (dict(rope_scaling={"rope_type": "yarn", "factor": 2.0}), "yarn has no original_max_position_embeddings"),
        (
            dict(rope_scaling={"type": "yarn", "original_max_position_embeddings": 4, "factor": 2.0, "mscale": 0.7}),
            "rope scaling field mscale is not supported",
        ),
    ],
)
def test_a_model_that_the_trainer_would_compute_otherwise(change, reason):
    faults = list(fit.model_faults(Architecture.from_hf({**QWEN3_30B_A3B, **change})))
    assert len(faults) == 1 and reason in faults[0]
    assert list(fit.model_faults(MOE)) == []


def test_every_fault_has_its_line(config):
    config.policy.parallel = ParallelConfig(tensor=8, expert=3)
    config.rollout.global_max_length = 131072
    with pytest.raises(UserError) as error:
        check_fit(config, 12)
    first, *lines = str(error.value).splitlines()
    assert "12 ranks" in first
    assert [line.split(":")[0].strip() for line in lines] == ["policy.parallel"] * 3 + ["rollout.global_max_length"]


def test_a_sequence_longer_than_the_model_has_positions(config):
    """The server would refuse it too, minutes later."""
    config.rollout.global_max_length = 40960 - config.data.max_prompt_length - 6
    check_fit(config, 1)
    config.rollout.global_max_length += 1
    with pytest.raises(UserError, match="takes 40961 positions, the model has 40960"):
        check_fit(config, 1)
    config.model.max_positions = 40961
    check_fit(config, 1)
    config.model.max_positions = 32768
    config.rollout.global_max_length = 32768
    with pytest.raises(UserError, match="takes 34822 positions, the model has 32768"):
        check_fit(config, 1)


def test_without_the_model_only_the_ranks_are_checked(config, tmp_path):
    config.model.path = str(tmp_path / "absent")
    config.policy.parallel = ParallelConfig(tensor=8)  # more than the model has key-value heads
    check_fit(config, 8)
    with pytest.raises(UserError, match="8 does not divide 4 ranks"):
        check_fit(config, 4)


def test_a_broken_config_json_is_named(config, tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ArchitectureError, match="config.json: not valid JSON"):
        check_fit(config, 1)


def test_torch_is_not_imported_for_it():
    """So that `ulorl config` answers at once."""
    code = "import sys, ulorl_megatron.cli; sys.exit('torch' in sys.modules or 'megatron' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
