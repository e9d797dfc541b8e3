"""Which layouts a model allows on a number of ranks. Arithmetic alone: neither Megatron nor torch is imported."""

import math
from typing import Iterator, Tuple

from checkpoint_tools.architecture import Architecture
from ulorl_megatron.config.schema import ParallelConfig


def padded_vocab_size(arch: Architecture, tensor_parallel: int) -> int:
    """Rows of the embedding: the words, and as few zero rows as equal shards need."""
    return -(-arch.vocab_size // tensor_parallel) * tensor_parallel


# Logits of a tile of the log-prob head: few enough for the cache of a CPU, and enough to keep a GPU busy.
_TILE = {"cpu": 2**20, "cuda": 2**26}


def tile_words(chunk: int, device: str) -> int:
    """Words of a tile of `chunk` tokens, whose logits exist at a time. device: cpu or cuda."""
    return max(_TILE[device] // chunk, 1)


def lockstep_replicas(sizes: ParallelConfig) -> int:
    """Data-parallel replicas that exchange tokens in every layer, since one group of experts is spread over them."""
    replica = sizes.tensor * sizes.context
    return math.lcm(replica, sizes.expert * sizes.expert_tensor) // replica


def faults(sizes: ParallelConfig, arch: Architecture, world: int) -> Iterator[str]:
    """Why the layout cannot work, one reason each; nothing if it can.

    MoE with tensor > 1 needs sequence parallelism (Megatron-Core refuses it without), which is on whenever tensor > 1.
    """
    yield from rank_faults(sizes, world)
    if arch.num_experts is None and (sizes.expert > 1 or sizes.expert_tensor > 1):
        yield "the model has no experts, so expert and expert_tensor must be 1"
    for name, size, what, count in _divisions(sizes, arch):
        if count % size:
            yield f"{name} = {size} does not divide {count} {what}"
    rows = padded_vocab_size(arch, sizes.tensor)
    if rows - arch.vocab_size >= rows // sizes.tensor:
        yield f"tensor = {sizes.tensor} leaves a rank without any of the {arch.vocab_size} words"


def rank_faults(sizes: ParallelConfig, world: int) -> Iterator[str]:
    """Why the layout does not fit the number of ranks, whatever the model."""
    model = sizes.tensor * sizes.pipeline * sizes.context
    if world % model:
        yield f"tensor x pipeline x context = {model} does not divide {world} ranks"
    experts = sizes.expert * sizes.expert_tensor * sizes.pipeline
    if world % experts:
        yield f"expert x expert_tensor x pipeline = {experts} does not divide {world} ranks"


def _divisions(sizes: ParallelConfig, arch: Architecture) -> Iterator[Tuple[str, int, str, int]]:
    """(name, size, what, count): the size must divide the count."""
    yield "tensor", sizes.tensor, "attention heads", arch.num_heads
    # Megatron-Core would copy key-value heads onto ranks beyond them; the weight map does not.
    yield "tensor", sizes.tensor, "key-value heads", arch.num_kv_heads
    yield "pipeline x virtual_pipeline", sizes.pipeline * sizes.virtual_pipeline, "layers", arch.num_layers
    if arch.num_experts is None:
        yield "tensor", sizes.tensor, "hidden units of the MLP", arch.intermediate_size
    else:
        yield "expert", sizes.expert, "experts", arch.num_experts
        yield "expert_tensor", sizes.expert_tensor, "expert hidden units", arch.moe_intermediate_size
