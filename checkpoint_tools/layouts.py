"""Layout changes between HF and Megatron tensors, whole and sharded. Pure torch; nothing here copies
needlessly."""

from collections.abc import Sequence

import torch

from checkpoint_tools.architecture import Architecture
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.name_map import Layout, Weight


def to_megatron(weight: Weight, arch: Architecture, hf_tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The full Megatron parameter, shape `weight.shape`, from its HF tensors (order and shapes of
    `weight.hf`).

    Raises CheckpointError when the number of tensors, a shape, or the dtypes do not fit.
    """
    if len(hf_tensors) != len(weight.hf):
        raise CheckpointError(f"{weight.megatron} is made of {', '.join(weight.hf)}; got {len(hf_tensors)} tensors.")
    for name, expected, tensor in zip(weight.hf, weight.hf_shapes, hf_tensors, strict=True):
        if tuple(tensor.shape) != expected:
            raise CheckpointError(f"{name}: shape {list(tensor.shape)}, the config asks for {list(expected)}.")
    if len({tensor.dtype for tensor in hf_tensors}) > 1:
        found = ", ".join(f"{n} {t.dtype}" for n, t in zip(weight.hf, hf_tensors, strict=True))
        raise CheckpointError(f"{weight.megatron}: its HF tensors have different dtypes: {found}.")
    if weight.layout is Layout.QKV:
        groups = [tensor.unflatten(0, (arch.num_kv_heads, -1)) for tensor in hf_tensors]
        return torch.cat(groups, dim=1).flatten(0, 1)
    if weight.layout is Layout.GATE_UP:
        return torch.cat(tuple(hf_tensors))
    return hf_tensors[0]


def to_hf(weight: Weight, arch: Architecture, full: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The inverse of `to_megatron`: HF tensors (views where possible) of shapes `weight.hf_shapes`.

    full: the whole parameter; padded vocabulary rows are dropped. Raises CheckpointError when its shape does
    not fit, so that a shard can never pass for the whole (slime#2280).
    """
    if weight.vocab and full.shape[0] > weight.shape[0]:
        full = full[: weight.shape[0]]
    if tuple(full.shape) != weight.shape:
        raise CheckpointError(f"{weight.megatron}: shape {list(full.shape)}, the config asks for {list(weight.shape)}.")
    if weight.layout is Layout.QKV:
        head, heads_per_group = arch.head_dim, arch.num_heads // arch.num_kv_heads
        groups = full.unflatten(0, (arch.num_kv_heads, -1))
        parts = groups.split((heads_per_group * head, head, head), dim=1)
        return tuple(part.flatten(0, 1) for part in parts)
    if weight.layout is Layout.GATE_UP:
        return full.chunk(2)
    return (full,)


def megatron_row(weight: Weight, position: int, row: int) -> int:
    """The row of the full parameter that is row `row` of HF tensor `position`, for layouts that keep rows in
    order.

    With it a weight too large for memory is converted in blocks of rows. Not for QKV, which interleaves.
    """
    if weight.layout is Layout.QKV:
        raise ValueError("QKV rows are interleaved: convert the whole weight with to_megatron")
    return sum(shape[0] for shape in weight.hf_shapes[:position]) + row


def pad_vocab(full: torch.Tensor, padded_size: int) -> torch.Tensor:
    """Append zero rows up to padded_size. Raises CheckpointError if there are more rows already."""
    missing = padded_size - full.shape[0]
    if missing < 0:
        raise CheckpointError(f"a vocabulary of {full.shape[0]} rows does not fit into {padded_size} padded rows.")
    return torch.nn.functional.pad(full, (0, 0, 0, missing)) if missing else full


def shard(weight: Weight, full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """This rank's part (a view where possible) of the full parameter in the group `weight.parallel` of `size`
    ranks.

    QKV: whole key-value groups. GATE_UP: a part of gate and the same part of up. A weight without `dim` is
    replicated. Vocabulary weights must be padded before. Raises CheckpointError when it does not divide.
    """
    if weight.dim is None or size == 1:
        return full
    units = full.shape[0] if weight.vocab else weight.units
    if units % size:
        what = {Layout.QKV: "key-value heads", Layout.GATE_UP: "rows of gate and up"}.get(weight.layout, "parts")
        raise CheckpointError(
            f"{weight.megatron}: {units} {what} do not divide over {size} {weight.parallel} ranks."
            f" Choose a size that divides {units}."
        )
    if weight.layout is Layout.GATE_UP:
        return torch.cat([half.chunk(size)[rank] for half in full.chunk(2)])
    return full.chunk(size, weight.dim)[rank]


def unshard(weight: Weight, shards: Sequence[torch.Tensor]) -> torch.Tensor:
    """The inverse of `shard`: the full parameter from the shards of all ranks, in rank order (vocabulary
    padded)."""
    if weight.dim is None or len(shards) == 1:
        return shards[0]
    if weight.layout is Layout.GATE_UP:
        gates, ups = zip(*(part.chunk(2) for part in shards), strict=True)
        return torch.cat((*gates, *ups))
    return torch.cat(tuple(shards), dim=weight.dim)
