"""Parameters of every rank, exactly: the map of checkpoint_tools, cut as Megatron cuts it."""

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Dict, Optional, Tuple

from checkpoint_tools.architecture import Architecture
from checkpoint_tools.name_map import Weight, weights
from ulorl_megatron.config.layout import padded_vocab_size
from ulorl_megatron.config.schema import ParallelConfig


@dataclass(frozen=True)
class ParameterCount:
    """Elements on one rank, by part. experts apart: fewer ranks share their gradients and optimizer state."""

    embedding: int
    attention: int
    mlp: int
    router: int
    norms: int
    head: int
    experts: int

    @property
    def dense(self) -> int:
        """All but the experts."""
        return self.total - self.experts

    @property
    def total(self) -> int:
        return sum(vars(self).values())


def parameter_count(arch: Architecture, sizes: ParallelConfig, stage: int) -> ParameterCount:
    """Of a rank of pipeline stage `stage`: all ranks of a stage hold as many. The layout must be a possible one.

    With tied embeddings the last stage has a copy, unless it is the first as well.
    """
    of_layer: Counter = Counter()
    for (part, parallel), elements in _layer(replace(arch, rope_scaling=None)).items():
        of_layer[part] += elements // {"tp": sizes.tensor, "etp": sizes.expert_tensor, None: 1}[parallel]
    layers = arch.num_layers // sizes.pipeline
    first, last = stage == 0, stage == sizes.pipeline - 1
    vocabulary = padded_vocab_size(arch, sizes.tensor) // sizes.tensor * arch.hidden_size
    return ParameterCount(
        embedding=first * vocabulary,
        attention=layers * of_layer["attention"],
        mlp=layers * of_layer["mlp"],
        router=layers * of_layer["router"],
        norms=layers * of_layer["norms"] + last * arch.hidden_size,
        head=(last and not (first and arch.tie_embeddings)) * vocabulary,
        experts=layers * of_layer["experts"] // sizes.expert,
    )


@lru_cache(maxsize=8)
def _layer(arch: Architecture) -> Dict[Tuple[str, Optional[str]], int]:
    """(field of ParameterCount, what splits it) -> elements of one whole layer. arch: without rope_scaling, which is
    no key for a cache and has no weights."""
    elements: Counter = Counter()
    for weight in weights(replace(arch, num_layers=1)):
        if weight.layer is not None:
            elements[_part(weight), weight.parallel] += weight.numel
    return elements


def _part(weight: Weight) -> str:
    """The field of ParameterCount a weight of a layer counts in."""
    if weight.expert is not None:
        return "experts"
    if len(weight.shape) == 1:
        return "norms"
    if "self_attention" in weight.megatron:
        return "attention"
    return "router" if "router" in weight.megatron else "mlp"
