"""The rows of `families.py` expanded for one model, and the names its parameters have in a live Megatron
model."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from checkpoint_tools.architecture import Architecture
from checkpoint_tools.families import FAMILIES, SPELLINGS, Layout, Row

__all__ = [
    "Layout",
    "Weight",
    "by_name",
    "canonical_name",
    "checkpoint_size",
    "extra_state_keys",
    "rows",
    "weights",
]


@dataclass(frozen=True)
class Weight:
    """One Megatron parameter of the whole model (not of one rank) and the HF tensors it is made of.

    megatron: canonical name: the local spec's, layer and expert counted over the whole model.
    hf, hf_shapes: names and shapes of the HF tensors, in the order `layouts` takes and gives them.
    shape: of the full parameter: unsharded, vocabulary unpadded.
    layout: see Layout. parallel, dim: the group ("tp" or "etp") that splits a dimension, or None and None.
    units: number of indivisible parts along dim (key-value groups for QKV), which the group size must divide;
    None where nothing is split, or where padding makes it divisible (vocab).
    vocab: rows are the vocabulary, padded by Megatron. layer, expert: global indices, or None.
    checkpoint_key, checkpoint_index: the key of a torch_dist checkpoint, and where in it: the indices of its
    leading dimensions (layer, or layer and expert).
    """

    megatron: str
    hf: tuple[str, ...]
    hf_shapes: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]
    layout: Layout
    parallel: str | None
    dim: int | None
    units: int | None
    vocab: bool
    layer: int | None
    expert: int | None
    checkpoint_key: str
    checkpoint_index: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def rows(arch: Architecture) -> list[Row]:
    """The rows of the family's table that this model has."""
    return [row for row in FAMILIES[arch.model_type] if not (row.untied_only and arch.tie_embeddings)]


def weights(arch: Architecture) -> list[Weight]:
    """Every weight of the model, in model order: embedding, layer by layer, final norm, output layer."""
    table = rows(arch)
    of_layer = [row for row in table if "{layer}" in row.megatron]
    first = table.index(of_layer[0])
    before, after = table[:first], table[first + len(of_layer) :]
    expanded = [_expand(arch, row, None, None) for row in before]
    for layer in range(arch.num_layers):
        expanded.extend(_expand_layer(arch, of_layer, layer))
    expanded.extend(_expand(arch, row, None, None) for row in after)
    return expanded


def by_name(arch: Architecture) -> dict[str, Weight]:
    """`weights(arch)` by canonical Megatron name."""
    return {weight.megatron: weight for weight in weights(arch)}


def checkpoint_size(arch: Architecture, weight: Weight) -> tuple[int, ...]:
    """Size of the whole tensor under `weight.checkpoint_key`: (layers, (experts,) *shape), or the shape
    alone."""
    stacked = (arch.num_layers, arch.num_experts or 0)[: len(weight.checkpoint_index)]
    return (*stacked, *weight.shape)


def extra_state_keys(arch: Architecture) -> list[str]:
    """Keys of the `_extra_state` objects that loading into a model asks for.

    Every module with a weight may ask for one, and Transformer Engine's attention, which has none, does too.
    """
    keys: dict[str, None] = {}
    for weight in weights(arch):
        modules = [weight.checkpoint_key.rpartition(".")[0]]
        if weight.layout is Layout.QKV:
            modules.append(modules[0].removesuffix("linear_qkv") + "core_attention")
        index = ".".join(map(str, weight.checkpoint_index)) or "0"
        sizes = checkpoint_size(arch, weight)[: len(weight.checkpoint_index)]
        suffix = f"._extra_state/shard_{index}_{'.'.join(map(str, sizes)) or '1'}"
        keys.update((module + suffix, None) for module in modules)
    return list(keys)


def canonical_name(name: str, *, layer_offset: int, expert_offset: int) -> str:
    """The canonical name of a parameter of one rank's GPTModel.

    name: from `named_parameters()`, of the local or the Transformer Engine spec, with any number of leading
    "module.". layer_offset: layers before this rank's (or model chunk's) first; expert_offset: experts before
    this rank's first.
    """
    while name.startswith("module."):
        name = name.removeprefix("module.")
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
    if match is None:
        return name
    layer, rest = int(match[1]) + layer_offset, match[2]
    for pattern, replacement in SPELLINGS:
        rest = re.sub(rf"^{pattern}$", replacement, rest)
    rest = re.sub(r"(?<=\.local_experts\.)\d+", lambda m: str(int(m[0]) + expert_offset), rest)
    return f"decoder.layers.{layer}.{rest}"


def _expand_layer(arch: Architecture, of_layer: list[Row], layer: int) -> Iterator[Weight]:
    expert_rows = [row for row in of_layer if "{expert}" in row.megatron]
    yield from (_expand(arch, row, layer, None) for row in of_layer if row not in expert_rows)
    for expert in range(arch.num_experts or 0):
        yield from (_expand(arch, row, layer, expert) for row in expert_rows)


def _expand(arch: Architecture, row: Row, layer: int | None, expert: int | None) -> Weight:
    sizes = {
        "vocab": arch.vocab_size,
        "hidden": arch.hidden_size,
        "query": arch.num_heads * arch.head_dim,
        "key_value": arch.num_kv_heads * arch.head_dim,
        "head": arch.head_dim,
        "ffn": arch.intermediate_size,
        "expert_ffn": arch.moe_intermediate_size,
        "experts": arch.num_experts,
    }
    hf_shapes = tuple(tuple(sizes[word] for word in shape) for _, shape in row.hf)
    shape = (sum(s[0] for s in hf_shapes), *hf_shapes[0][1:])
    if row.layout is Layout.QKV:
        units = arch.num_kv_heads
    elif row.layout is Layout.GATE_UP:
        units = hf_shapes[0][0]
    else:
        units = None if row.dim is None or row.vocab else shape[row.dim]
    return Weight(
        megatron=row.megatron.format(layer=layer, expert=expert),
        hf=tuple(name.format(layer=layer, expert=expert) for name, _ in row.hf),
        hf_shapes=hf_shapes,
        shape=shape,
        layout=row.layout,
        parallel=row.parallel,
        dim=row.dim,
        units=units,
        vocab=row.vocab,
        layer=layer,
        expert=expert,
        checkpoint_key=row.checkpoint,
        checkpoint_index=tuple(index for index in (layer, expert) if index is not None),
    )
