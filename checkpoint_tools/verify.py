"""Bit-for-bit comparison of two checkpoints of either kind, in blocks, as HF tensors."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.name_map import Weight
from checkpoint_tools.sources import Source

_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@dataclass(frozen=True)
class Difference:
    """A tensor (HF name) that is not bit-equal. first: index of the first element that differs."""

    name: str
    reason: str


@dataclass(frozen=True)
class Comparison:
    tensors: int
    elements: int
    differences: list[Difference]


def compare(a: Source, b: Source, workers: int = 1) -> Comparison:
    """Compare all weights. Raises CheckpointError when the two are not of one shape of model."""
    shapes_a, shapes_b = (
        {name: shape for w in source.weights for name, shape in zip(w.hf, w.hf_shapes, strict=True)}
        for source in (a, b)
    )
    if shapes_a != shapes_b:
        name = min(n for n in shapes_a.keys() | shapes_b.keys() if shapes_a.get(n) != shapes_b.get(n))
        raise CheckpointError(
            f"{a.directory} and {b.directory} are different models: {name} has shape"
            f" {shapes_a.get(name, 'absent')} in the first and {shapes_b.get(name, 'absent')} in the second."
        )
    with ThreadPoolExecutor(workers) as pool:
        found = pool.map(lambda weight: list(_differences(a, b, weight)), a.weights)
        differences = [difference for of_weight in found for difference in of_weight]
    return Comparison(len(shapes_a), sum(weight.numel for weight in a.weights), differences)


def _differences(a: Source, b: Source, weight: Weight) -> Iterator[Difference]:
    if a.dtype(weight) != b.dtype(weight):
        for name in weight.hf:
            yield Difference(name, f"dtype {a.dtype(weight)} against {b.dtype(weight)}")
        return
    counts = dict.fromkeys(range(len(weight.hf)), 0)
    first: dict[int, str] = {}
    for (position, row, x), (_, _, y) in zip(a.blocks(weight), b.blocks(weight), strict=True):
        bits = _BITS[x.element_size()]
        if torch.equal(x.view(bits), y.view(bits)):
            continue
        where = (x.view(bits) != y.view(bits)).nonzero()
        counts[position] += len(where)
        index = where[0].tolist()
        values = x[tuple(index)].item(), y[tuple(index)].item()
        first.setdefault(position, f"first at {[index[0] + row, *index[1:]]}: {values[0]} against {values[1]}")
    for position, text in first.items():
        elements = torch.Size(weight.hf_shapes[position]).numel()
        yield Difference(weight.hf[position], f"{counts[position]} of {elements} elements, {text}")
