"""Positions beyond config.json's: the same numbers for the trainer, the servers and the exported config.json."""

import json
from pathlib import Path

import pytest
import torch

from checkpoint_tools.architecture import Architecture
from checkpoint_tools.companions import copy_companions
from tests.checkpoint_tools.support import QWEN3_30B_A3B
from ulorl_megatron.config.positions import architecture, changed_fields, context_length, faults
from ulorl_megatron.config.schema import Config, ModelConfig
from ulorl_megatron.rollout import server

OLD = {k: v for k, v in QWEN3_30B_A3B.items() if k not in ("rope_scaling", "rope_parameters")}
NEW = {
    **{k: v for k, v in OLD.items() if k != "rope_theta"},
    "rope_parameters": {"rope_type": "default", "rope_theta": OLD["rope_theta"]},
}
YARN = {"rope_type": "yarn", "factor": 1.5, "original_max_position_embeddings": 95232}


@pytest.fixture(params=[OLD, NEW], ids=["transformers-4", "transformers-5"])
def config(request, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(request.param))
    config = Config()
    config.model.path = str(tmp_path)
    return config


def exported(config, directory):
    copy_companions(Path(config.model.path), directory, torch.bfloat16, changed_fields(config.model))
    return json.loads((directory / "config.json").read_text())


def server_override(config):
    command = server.command(config, 0, 30000)
    if "--json-model-override-args" not in command:
        return {}
    return json.loads(command[command.index("--json-model-override-args") + 1])


def test_nothing_is_changed_unless_asked(config, tmp_path):
    assert changed_fields(config.model) == {} == server_override(config)
    original = json.loads((tmp_path / "config.json").read_text())
    assert {**exported(config, tmp_path / "out"), "torch_dtype": None} == {**original, "torch_dtype": None}


def test_extension_without_scaling(config, tmp_path):
    config.model.max_positions = 133126
    arch = architecture(config.model)
    assert (arch.max_position_embeddings, arch.rope_scaling, arch.rope_theta) == (133126, None, 1e6)
    assert Architecture.from_hf(exported(config, tmp_path / "out")) == arch
    assert server_override(config) == {"max_position_embeddings": 133126}


def test_yarn(config, tmp_path):
    config.model.yarn_factor, config.model.yarn_original = 1.5, 95232
    arch = architecture(config.model)
    assert (arch.max_position_embeddings, arch.rope_scaling, arch.rope_theta) == (142848, YARN, 1e6)
    written = exported(config, tmp_path / "out")
    assert Architecture.from_hf(written) == arch
    assert ("rope_scaling" in written) != ("rope_parameters" in written)  # the file keeps its dialect
    override = server_override(config)
    assert Architecture.from_hf(config.model.path, override) == arch
    assert override == {key: written[key] for key in override}


def test_the_servers_have_room_for_the_longest_sequence(config):
    config.rollout.global_max_length, config.data.max_prompt_length = 1000, 50
    assert context_length(config) == 1056
    command = server.command(config, 0, 30000)
    assert command[command.index("--context-length") + 1] == "1056"


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        (dict(max_positions=0), "model.max_positions: 0 is below 1"),
        (dict(yarn_factor=1.5), "model.yarn_original: no value"),
        (dict(yarn_original=4096), "model.yarn_factor: no value"),
        (dict(yarn_factor=1.0, yarn_original=4096), "model.yarn_factor: 1.0 is not above 1"),
        (dict(yarn_factor=1.5, yarn_original=0), "model.yarn_original: 0 is below 1"),
        (dict(yarn_factor=1.3, yarn_original=4097), "not a whole number of positions"),
        (dict(yarn_factor=1.5, yarn_original=4096, max_positions=4096), "model.max_positions: 4096, but YaRN makes"),
    ],
)
def test_keys_that_contradict(keys, fault):
    (found,) = faults(ModelConfig("m", **keys))
    assert fault in found


def test_keys_that_agree():
    for keys in (dict(), dict(max_positions=5), dict(yarn_factor=1.5, yarn_original=4096, max_positions=6144)):
        assert list(faults(ModelConfig("m", **keys))) == []
