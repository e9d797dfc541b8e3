"""What a conversion can prove of itself: the certificate, and the index tensors behind it."""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import torch
import xxhash

from checkpoint_tools import layouts
from checkpoint_tools.architecture import Architecture
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.families import FAMILIES
from checkpoint_tools.name_map import Layout, Weight
from checkpoint_tools.sources import Block, row_blocks

CERTIFICATE_NAME = "conversion.json"
_MAX_INDEXED = 4 * 2**20  # elements; layouts move whole rows, so that of a larger weight 8 columns are enough
_COLUMNS = 8


def map_digest(arch: Architecture) -> str:
    """SHA-256 of the table of the model's family: which map a certificate was made with."""
    return hashlib.sha256(repr(FAMILIES[arch.model_type]).encode()).hexdigest()


class TensorHashes:
    """xxh3-128 of HF tensors that arrive in blocks, in order. One weight is hashed by one thread."""

    def __init__(self) -> None:
        self._running: dict[str, Any] = {}

    def update(self, name: str, rows: torch.Tensor) -> None:
        digest = self._running.setdefault(name, xxhash.xxh3_128())
        digest.update(rows.contiguous().flatten().view(torch.uint8).numpy())

    def result(self) -> dict[str, str]:
        return {name: digest.hexdigest() for name, digest in self._running.items()}


def megatron_blocks(weight: Weight, arch: Architecture, blocks: Iterator[Block]) -> Iterator[tuple[int, torch.Tensor]]:
    """(first row, rows) of the Megatron parameter from blocks of its HF tensors (see Source.blocks)."""
    if weight.layout is Layout.QKV:
        yield 0, layouts.to_megatron(weight, arch, [tensor for _, _, tensor in blocks])
        return
    for position, row, tensor in blocks:
        yield layouts.megatron_row(weight, position, row), tensor


def prove_bijection(arch: Architecture, weights: list[Weight]) -> dict[str, Any]:
    """Show that the map loses and repeats nothing; returns what was shown, for the certificate.

    Names: every HF name belongs to one weight, every place in the checkpoint to one weight. Elements: for
    every distinct kind of weight, tensors that hold their own element numbers go through the conversion, and
    every number must arrive exactly once, and come back to its place. Raises CheckpointError otherwise: the
    table is wrong.
    """
    names = [name for weight in weights for name in weight.hf]
    places = [(weight.checkpoint_key, weight.checkpoint_index) for weight in weights]
    for what, listed in (("HF name", names), ("checkpoint key and index", places)):
        if len(set(listed)) != len(listed):
            repeated = next(item for item in listed if listed.count(item) > 1)
            raise CheckpointError(f"the map uses the {what} {repeated} twice.")
    kinds = {(weight.layout, weight.hf_shapes): weight for weight in weights}
    proved = [_prove_kind(arch, weight) for weight in kinds.values()]
    return {
        "hf_names_each_read_once": len(names),
        "checkpoint_places_each_written_once": len(places),
        "kinds_shown_by_index_tensors": proved,
    }


def _prove_kind(arch: Architecture, weight: Weight) -> dict[str, Any]:
    if weight.numel > _MAX_INDEXED:
        weight = replace(
            weight,
            shape=(weight.shape[0], _COLUMNS),
            hf_shapes=tuple((shape[0], _COLUMNS) for shape in weight.hf_shapes),
        )
    numbers = torch.arange(weight.numel, dtype=torch.int32)
    tensors, start = [], 0
    for shape in weight.hf_shapes:
        count = torch.Size(shape).numel()
        tensors.append(numbers[start : start + count].view(shape))
        start += count

    def blocks() -> Iterator[Block]:
        for position, tensor in enumerate(tensors):
            whole = weight.layout is Layout.QKV or tensor.ndim == 1
            ranges = [(0, tensor.shape[0])] if whole else row_blocks(tuple(tensor.shape), 4)
            yield from ((position, begin, tensor[begin:end]) for begin, end in ranges)

    full = torch.full(weight.shape, -1, dtype=torch.int32)
    for row, rows in megatron_blocks(weight, arch, blocks()):
        target = full[row : row + rows.shape[0]]
        if (target != -1).any():
            raise CheckpointError(f"{weight.megatron}: rows from {row} on are written twice.")
        target.copy_(rows)
    arrived = torch.zeros(weight.numel, dtype=torch.int8)
    arrived.index_add_(0, full.flatten().clamp(min=0).long(), torch.ones(weight.numel, dtype=torch.int8))
    back = layouts.to_hf(weight, arch, full)
    if not bool((arrived == 1).all()) or not all(map(torch.equal, back, tensors)):
        raise CheckpointError(f"{weight.megatron}: the layout {weight.layout.value} loses or repeats elements.")
    return {"layout": weight.layout.value, "example": weight.megatron, "elements": weight.numel}


def certificate(arch: Architecture, weights: list[Weight], hashes: dict[str, str], **facts: Any) -> dict[str, Any]:
    """The certificate's content. Raises CheckpointError unless exactly the map's HF tensors have been
    converted."""
    expected = {name: weight for weight in weights for name in weight.hf}
    if hashes.keys() != expected.keys():
        odd = min(hashes.keys() ^ expected.keys())
        raise CheckpointError(f"{odd}: converted and mapped tensors differ; nothing was published.")
    return {
        "format": 1,
        **facts,
        "architecture": asdict(arch),
        "map": {"family": arch.model_type, "sha256": map_digest(arch)},
        "hf_tensors": len(expected),
        "megatron_parameters": len(weights),
        "elements": sum(weight.numel for weight in weights),
        "proof": prove_bijection(arch, weights),
        "hash": "xxh3_128 of the bytes of the HF tensor in the dtype written",
        "tensors": {
            name: {"hash": hashes[name], "shape": list(shape), "megatron": weight.megatron}
            for weight in weights
            for name, shape in zip(weight.hf, weight.hf_shapes, strict=True)
        },
    }
