"""Megatron's model against transformers', for the same weights."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from checkpoint_tools.architecture import Architecture
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.hf_files import HFReader
from tests.policy.support import (
    assert_gradients_close,
    hf_weights,
    make_samples,
    objective,
    policy_config,
    read_out_gradients,
    reference,
)
from tests.tiny_models import tiny_model
from ulorl_megatron.config.schema import ParallelConfig, Recompute, TransformerImpl
from ulorl_megatron.errors import UserError
from ulorl_megatron.policy import Policy
from ulorl_megatron.policy.attention import PackedCausalAttention
from ulorl_megatron.policy.model import RMSNorm, padded_vocab_size, transformer_config
from ulorl_megatron.policy.packing import pack_lengths
from ulorl_megatron.weight_sync import publish_weights

KINDS = ["moe", "dense", "tied"]


def logits(policy, sequences):
    """[tokens, V] of the sequences in one pack."""
    lengths = [len(s) for s in sequences]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    with torch.no_grad():
        out = policy._models[0](
            torch.cat(sequences)[None], positions, None, packed_seq_params=pack_lengths(lengths, torch.device("cpu"))
        )
    return out[0]


def hf_logits(path, sequences):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        return torch.cat([model(input_ids=s[None]).logits[0] for s in sequences])


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers(tiny, tmp_path, kind):
    sequences = [s.tokens for s in make_samples(4)]
    policy = Policy(policy_config(tiny(kind), tmp_path))
    difference = logits(policy, sequences) - hf_logits(tiny(kind), sequences)
    assert difference.abs().max() < 1e-5


def test_yarn_logits_equal_transformers(tmp_path):
    scaling = {"rope_type": "yarn", "factor": 1.5, "original_max_position_embeddings": 32, "rope_theta": 1e4}
    path = tiny_model(tmp_path / "yarn", "moe", rope_parameters=scaling, max_position_embeddings=48)
    sequences = [torch.arange(45), torch.arange(20)]
    policy = Policy(policy_config(path, tmp_path / "run"))
    expected = hf_logits(path, sequences)
    assert (logits(policy, sequences) - expected).abs().max() < 1e-5
    plain = tiny_model(tmp_path / "plain", "moe")
    assert (hf_logits(plain, sequences) - expected).abs().max() > 1e-2  # scaling does something here


@pytest.mark.parametrize("dialect", ["transformers-4", "transformers-5"])
def test_yarn_of_the_configuration_is_the_yarn_of_the_exported_weights(tiny, tmp_path, dialect):
    source = tmp_path / "source"
    shutil.copytree(tiny("dense"), source)
    if dialect == "transformers-4":
        fields = json.loads((source / "config.json").read_text())
        fields |= {"rope_theta": fields.pop("rope_parameters")["rope_theta"], "rope_scaling": None}
        (source / "config.json").write_text(json.dumps(fields))
    config = policy_config(source, tmp_path / "run")
    config.model.yarn_factor, config.model.yarn_original = 1.5, 32
    policy = Policy(config)
    ranks = SimpleNamespace(rank=0, world_size=1, only_first=lambda work: work(), gather=lambda item: [item])
    folder = publish_weights(policy, ranks, config.model, tmp_path / "weights", 1, keep=1)
    sequences = [torch.arange(48), torch.arange(20)]
    difference = logits(policy, sequences) - hf_logits(folder, sequences)
    assert difference.abs().max() < 1e-5
    assert (hf_logits(folder, sequences) - hf_logits(source, sequences)).abs().max() > 1e-2


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_equal_transformers(tiny, tmp_path, kind):
    """Through packing, schedule, head, loss and distributed optimizer."""
    samples = make_samples()
    config = policy_config(tiny(kind), tmp_path)
    read_out_gradients(config)
    policy = Policy(config)
    before = hf_weights(policy)
    policy.update(samples, objective())
    after = hf_weights(policy)
    gradients = {name: (before[name] - after[name]) / 1e3 for name in before}
    assert_gradients_close(gradients, reference(tiny(kind), samples).gradients, tolerance=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_export_is_what_was_loaded(tiny, tmp_path, kind):
    reader = HFReader(tiny(kind))
    exported = hf_weights(Policy(policy_config(tiny(kind), tmp_path)))
    assert exported.keys() == reader.entries.keys()
    assert all(torch.equal(tensor, reader.read(name)) for name, tensor in exported.items())


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda tensors: tensors.update(stray=torch.zeros(1)), "stray .* belongs to no qwen3_moe parameter"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(3)}), r"model.norm.weight: shape \[3\]"),
    ],
)
def test_every_tensor_is_read_once_or_the_load_stops(tiny, tmp_path, change, message):
    path = tmp_path / "faulty"
    shutil.copytree(tiny(), path)
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        Policy(policy_config(path, tmp_path))


def test_router_auxiliary_loss_of_the_model_does_not_leak_in(tiny, tmp_path):  # SkyRL#838, NeMo-RL#3169
    """Neither it nor the z-loss; that the gradient has none of it: test_invariance.py."""
    built = transformer_config(Architecture.from_hf(tiny()), policy_config(tiny(), tmp_path).policy, torch.float32)
    assert built.moe_aux_loss_coeff == 0 and built.moe_router_load_balancing_type == "none"
    assert built.moe_z_loss_coeff is None


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_recomputation_changes_nothing(tiny, tmp_path, monkeypatch, kind):
    """Gradients to the bit. Under parallel layouts: tests/parallel."""
    config = policy_config(tiny(kind), tmp_path)
    read_out_gradients(config)
    calls = Counter()
    for name, module in (("attention", PackedCausalAttention), ("norm", RMSNorm)):
        monkeypatch.setattr(module, "forward", counted(module.forward, calls, name))
    weights, counts = {}, {}
    for recompute in Recompute:
        calls.clear()
        config.policy.recompute = recompute
        policy = Policy(config)
        policy.update(make_samples(), objective())
        weights[recompute], counts[recompute] = hf_weights(policy), dict(calls)
    for recompute in (Recompute.selective, Recompute.full):
        for name, weight in weights[Recompute.none].items():
            assert torch.equal(weights[recompute][name], weight), name
    none, selective, full = (counts[recompute] for recompute in (Recompute.none, Recompute.selective, Recompute.full))
    assert selective == {"attention": 2 * none["attention"], "norm": none["norm"]}
    final_norms = none["attention"] // 2  # one a micro-batch, attention has two layers; it belongs to no layer
    assert full == {"attention": 2 * none["attention"], "norm": 2 * none["norm"] - final_norms}


def counted(forward, calls, name):
    def wrapped(*args, **kwargs):
        calls[name] += 1
        return forward(*args, **kwargs)

    return wrapped


def test_layouts_and_models_that_cannot_work_are_refused_before_groups_are_made(tiny, tmp_path):
    """The single reasons are in tests/config/test_fit.py."""
    path = tmp_path / "faulty"
    shutil.copytree(tiny(), path)
    config = json.loads((path / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="does not divide 1 ranks; .* 8 experts; rope scaling 'linear'"):
        Policy(policy_config(path, tmp_path, ParallelConfig(expert=3)))


def test_transformer_engine_is_asked_for_by_name(tiny, tmp_path):
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if HAVE_TE:
        pytest.skip("Transformer Engine is installed")
    config = policy_config(tiny(), tmp_path)
    config.policy.transformer_impl = TransformerImpl.te
    with pytest.raises(UserError, match="Transformer Engine is not installed"):
        Policy(config)


def test_the_vocabulary_is_padded_to_equal_shards(tiny):
    arch = replace(Architecture.from_hf(tiny()), vocab_size=271)
    assert [padded_vocab_size(arch, size) for size in (1, 2, 8)] == [271, 272, 272]
