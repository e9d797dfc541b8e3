"""Megatron's process groups, and which layouts a model allows."""

from typing import Iterator

import torch.distributed as dist
from megatron.core import parallel_state as mpu

from checkpoint_tools.architecture import Architecture
from ulorl_megatron.config.schema import ParallelConfig
from ulorl_megatron.errors import UserError


def initialize(sizes: ParallelConfig, arch: Architecture) -> None:
    """Create the process groups of `sizes` over all ranks, unless they exist already with these sizes.

    Raises UserError, with every reason, if the layout does not fit the model or the number of ranks.
    """
    world = dist.get_world_size()
    reasons = list(faults(sizes, arch, world))
    if reasons:
        raise UserError(f"policy.parallel does not fit {world} ranks and this model: " + "; ".join(reasons))
    if mpu.model_parallel_is_initialized():
        existing = ParallelConfig(
            tensor=mpu.get_tensor_model_parallel_world_size(),
            pipeline=mpu.get_pipeline_model_parallel_world_size(),
            virtual_pipeline=mpu.get_virtual_pipeline_model_parallel_world_size() or 1,
            context=mpu.get_context_parallel_world_size(),
            expert=mpu.get_expert_model_parallel_world_size(),
            expert_tensor=mpu.get_expert_tensor_parallel_world_size(),
        )
        if existing != sizes:
            raise RuntimeError(f"Megatron's groups exist with another layout: {existing}, not {sizes}")
        return
    mpu.initialize_model_parallel(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=sizes.virtual_pipeline if sizes.virtual_pipeline > 1 else None,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=sizes.expert_tensor,  # explicit: its default is the tensor size
    )


def faults(sizes: ParallelConfig, arch: Architecture, world: int) -> Iterator[str]:
    """Why the layout cannot work, one reason each; nothing if it can."""
    model = sizes.tensor * sizes.pipeline * sizes.context
    if world % model:
        yield f"tensor x pipeline x context = {model} does not divide {world} ranks"
    experts = sizes.expert * sizes.expert_tensor * sizes.pipeline
    if world % experts:
        yield f"expert x expert_tensor x pipeline = {experts} does not divide {world} ranks"
    divisions = [
        ("tensor", sizes.tensor, "attention heads", arch.num_heads),
        ("tensor", sizes.tensor, "key-value heads", arch.num_kv_heads),
        ("pipeline x virtual_pipeline", sizes.pipeline * sizes.virtual_pipeline, "layers", arch.num_layers),
    ]
    if arch.num_experts:
        divisions += [
            ("expert", sizes.expert, "experts", arch.num_experts),
            ("expert_tensor", sizes.expert_tensor, "expert hidden units", arch.moe_intermediate_size),
        ]
    else:
        divisions.append(("tensor", sizes.tensor, "hidden units of the MLP", arch.intermediate_size))
        if sizes.expert > 1 or sizes.expert_tensor > 1:
            yield "the model has no experts, so expert and expert_tensor must be 1"
    for name, size, what, count in divisions:
        if count % size:
            yield f"{name} = {size} does not divide {count} {what}"
