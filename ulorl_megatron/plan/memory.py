"""Bytes on every rank at the fullest moment of a training step."""

from dataclasses import dataclass
from math import ceil
from typing import Dict, List

from ulorl_megatron.config.schema import Dtype
from ulorl_megatron.plan.activations import head_work, layer_activations
from ulorl_megatron.plan.cards import GIB
from ulorl_megatron.plan.layout import Layout
from ulorl_megatron.plan.parameters import ParameterCount, parameter_count

# CUDA context, NCCL communicators and cuBLAS workspaces of one rank; a CPU rank's interpreter and libraries.
_RUNTIME_CUDA, _RUNTIME_CPU = 3 * GIB, GIB // 2
# What the allocator holds beyond what is in use, as a part of the activations.
FRAGMENTATION = 0.1


@dataclass(frozen=True)
class RankMemory:
    """Bytes of a rank of one pipeline stage.

    kept: activations by part, of all layers and micro-batches in flight. layer: of the layer in its forward or backward
    pass. head: of the log-prob head; 0 where the stage has none. Only the larger of the two counts, since they are
    needed at different times. update: of the optimizer's step, when no activations are left. fragmentation, runtime:
    see the assumptions.
    """

    stage: int
    count: ParameterCount
    parameters: int
    gradients: int
    optimizer: int
    kept: Dict[str, int]
    layer: int
    head: int
    update: int
    fragmentation: int
    runtime: int

    @property
    def activations(self) -> int:
        return sum(self.kept.values()) + max(self.layer, self.head)

    @property
    def total(self) -> int:
        fixed = self.parameters + self.gradients + self.optimizer
        return fixed + max(self.activations + self.fragmentation, self.update) + self.runtime


def runtime(layout: Layout) -> int:
    """Bytes a rank takes before it holds anything."""
    return _RUNTIME_CUDA if layout.cuda else _RUNTIME_CPU


def memory(layout: Layout) -> List[RankMemory]:
    """Of every pipeline stage; all ranks of a stage need as much."""
    return [_of_stage(layout, stage) for stage in range(layout.sizes.pipeline)]


def _of_stage(layout: Layout, stage: int) -> RankMemory:
    count = parameter_count(layout.arch, layout.sizes, stage)
    of_layer = layer_activations(layout)
    kept = {part: size * layout.layers_in_flight(stage) for part, size in of_layer.kept.items()}
    head = head_work(layout) if stage == layout.sizes.pipeline - 1 else 0
    layer = of_layer.recomputed + of_layer.work
    activations = sum(kept.values()) + max(layer, head)
    return RankMemory(
        stage=stage,
        count=count,
        parameters=count.total * layout.item,
        gradients=count.total * 4,  # policy/policy.py: grad_reduce_in_fp32
        optimizer=_optimizer(layout, count),
        kept=kept,
        layer=layer,
        head=head,
        # gloo copies the gradients it sums, and the weights it gathers; NCCL works in place.
        update=0 if layout.cuda else count.total * (4 + layout.item),
        fragmentation=int(activations * FRAGMENTATION) if layout.cuda else 0,
        runtime=runtime(layout),
    )


def _optimizer(layout: Layout, count: ParameterCount) -> int:
    """Two float32 moments, and the float32 master of a bfloat16 weight, each on one of its replicas alone.

    Offloaded moments are in host memory; one weight's at a time come to the GPU.
    """
    master = 4 if layout.dtype is Dtype.bfloat16 else 0
    width = master + (0 if layout.offload and layout.cuda else 8)
    return width * (ceil(count.dense / layout.dense_replicas) + ceil(count.experts / layout.expert_replicas))
