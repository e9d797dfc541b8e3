from itertools import product

import pytest
import torch

from checkpoint_tools import layouts
from checkpoint_tools.architecture import Architecture
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.name_map import Layout, by_name, canonical_name, weights
from tests.checkpoint_tools.support import assert_bit_equal, tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["moe", "dense", "tied"])
def test_the_round_trip_is_bit_equal(pristine, kind, dtype):
    arch = Architecture.from_hf(pristine(kind))
    source = {name: tensor.to(dtype) for name, tensor in tensors(pristine(kind)).items()}
    back = {}
    for weight in weights(arch):
        full = layouts.to_megatron(weight, arch, [source[name] for name in weight.hf])
        assert tuple(full.shape) == weight.shape
        back.update(zip(weight.hf, layouts.to_hf(weight, arch, full), strict=True))
    assert_bit_equal(back, source)


def test_qkv_holds_each_group_with_its_queries(pristine):
    """Heads 0, 1 use key-value head 0, heads 2, 3 use 1: [q0 q1 k0 v0 q2 q3 k1 v1], 16 rows each."""
    arch = Architecture.from_hf(pristine("moe"))
    weight = by_name(arch)["decoder.layers.0.self_attention.linear_qkv.weight"]
    q, k, v = (
        (torch.arange(rows) // 16 + start)[:, None].expand(rows, 64) for rows, start in ((64, 0), (32, 10), (32, 20))
    )
    full = layouts.to_megatron(weight, arch, [q, k, v])
    assert full[::16, 0].tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


@pytest.mark.parametrize(
    ("kind", "grid"),
    [("moe", product((1, 2), (1, 2, 4), (1, 2), (1, 2, 4))), ("tied", product((1, 2), (1,), (1,), (1, 2)))],
)
def test_every_layout_of_the_grid_covers_the_model_and_unshards_bit_equal(pristine, kind, grid):
    """Each rank's names and shards, then all of them put together again: (tp, ep, expert-tp, layer
    chunks)."""
    arch = Architecture.from_hf(pristine(kind))
    source = tensors(pristine(kind))
    table = by_name(arch)
    for tp, ep, etp, stages in grid:
        if arch.num_layers % stages:
            continue
        held: dict[str, dict[int, torch.Tensor]] = {}
        for stage, ep_rank, rank in product(range(stages), range(ep), range(max(tp, etp))):
            for weight in table.values():
                local = _local_name(arch, weight, stage, stages, ep_rank, ep)
                if local is None:
                    continue
                name = canonical_name(
                    local,
                    layer_offset=stage * (arch.num_layers // stages),
                    expert_offset=ep_rank * ((arch.num_experts or 0) // ep),
                )
                assert name == weight.megatron
                size = etp if weight.parallel == "etp" else tp
                full = layouts.to_megatron(weight, arch, [source[n] for n in weight.hf])
                if weight.vocab:
                    full = layouts.pad_vocab(full, 280)
                if rank < size:
                    part = layouts.shard(weight, full, rank, size)
                    assert weight.dim is None or part.numel() * size == full.numel()
                    held.setdefault(name, {})[rank] = part
        assert held.keys() == table.keys()
        back = {}
        for name, parts in held.items():
            full = layouts.unshard(table[name], [parts[rank] for rank in sorted(parts)])
            back.update(zip(table[name].hf, layouts.to_hf(table[name], arch, full), strict=True))
        assert_bit_equal(back, source)


def _local_name(arch, weight, stage, stages, ep_rank, ep):
    """The name on the rank, or None if it is not there."""
    name = weight.megatron
    if weight.layer is not None:
        layer = weight.layer - stage * (arch.num_layers // stages)
        if not 0 <= layer < arch.num_layers // stages:
            return None
        name = name.replace(f".layers.{weight.layer}.", f".layers.{layer}.")
    elif stage != (0 if name.startswith("embedding") else stages - 1):
        return None
    if weight.expert is not None:
        expert = weight.expert - ep_rank * (arch.num_experts // ep)
        if not 0 <= expert < arch.num_experts // ep:
            return None
        name = name.replace(f"local_experts.{weight.expert}.", f"local_experts.{expert}.")
    return name


def test_gate_and_up_are_split_each(pristine):
    arch = Architecture.from_hf(pristine("moe"))
    weight = by_name(arch)["decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight"]
    full = torch.cat([torch.zeros(32, 64), torch.ones(32, 64)])
    part = layouts.shard(weight, full, 1, 2)
    assert part[:, 0].tolist() == [0.0] * 16 + [1.0] * 16


def test_a_shard_never_passes_for_the_whole(pristine):
    """slime#2280: expert-TP shards sent as if they were full."""
    arch = Architecture.from_hf(pristine("moe"))
    for weight in weights(arch):
        if weight.dim is not None and not weight.vocab:
            shape = list(weight.shape)
            shape[weight.dim] //= 2
            with pytest.raises(CheckpointError, match="the config asks for"):
                layouts.to_hf(weight, arch, torch.zeros(shape))


def test_key_value_heads_are_not_split(pristine):
    arch = Architecture.from_hf(pristine("moe"))
    weight = next(w for w in weights(arch) if w.layout is Layout.QKV)
    with pytest.raises(CheckpointError, match="2 key-value heads do not divide over 4 tp ranks"):
        layouts.shard(weight, torch.zeros(weight.shape), 0, 4)


def test_wrong_hf_shapes_and_mixed_dtypes_are_named(pristine):
    arch = Architecture.from_hf(pristine("dense"))
    weight = by_name(arch)["decoder.layers.1.mlp.linear_fc1.weight"]
    good = [torch.zeros(shape) for shape in weight.hf_shapes]
    with pytest.raises(
        CheckpointError, match=r"layers.1.mlp.up_proj.weight: shape \[3, 64\], the config asks for \[128, 64\]"
    ):
        layouts.to_megatron(weight, arch, [good[0], torch.zeros(3, 64)])
    with pytest.raises(CheckpointError, match="different dtypes"):
        layouts.to_megatron(weight, arch, [good[0], good[1].bfloat16()])


def test_padding_is_dropped_and_never_too_small(pristine):
    arch = Architecture.from_hf(pristine("tied"))
    weight = by_name(arch)["embedding.word_embeddings.weight"]
    full = torch.randn(weight.shape)
    padded = layouts.pad_vocab(full, 300)
    assert padded.shape[0] == 300 and not padded[272:].any()
    assert torch.equal(layouts.to_hf(weight, arch, padded)[0], full)
    with pytest.raises(CheckpointError, match="272 rows does not fit into 271"):
        layouts.pad_vocab(full, 271)
