"""Megatron's process groups."""

import torch.distributed as dist
from megatron.core import parallel_state as mpu

from checkpoint_tools.architecture import Architecture
from ulorl_megatron.config.fit import model_faults
from ulorl_megatron.config.layout import faults
from ulorl_megatron.config.schema import ParallelConfig
from ulorl_megatron.errors import UserError


def initialize(sizes: ParallelConfig, arch: Architecture) -> None:
    """Create the process groups of `sizes` over all ranks, unless they exist already with these sizes.

    Raises UserError, with every reason, if the layout does not fit the model or the number of ranks.
    """
    world = dist.get_world_size()
    reasons = [*faults(sizes, arch, world), *model_faults(arch)]
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


def describe(sizes: ParallelConfig) -> str:
    """The layout in words, for people: "8 ranks, tensor 2, expert 4"."""
    world = dist.get_world_size()
    ranks = "1 rank" if world == 1 else f"{world} ranks"
    return ", ".join([ranks, *(f"{name} {size}" for name, size in vars(sizes).items() if size > 1)])
