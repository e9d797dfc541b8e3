"""Megatron's data parallelism around the model chunks, and what it sends while others compute."""

from typing import List

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from ulorl_megatron.config.schema import OverlapConfig


def wrap(
    models: List[GPTModel], config: TransformerConfig, overlap: OverlapConfig, dtype: torch.dtype
) -> List[DistributedDataParallel]:
    """The chunks with float32 gradient buffers; tells the schedules, by `config`, when gradients are to be summed."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlap.grad_reduce,
        overlap_param_gather=overlap.param_gather,
    )
    chunks = []
    for model in models:
        module = Float16Module(config, model) if dtype is torch.bfloat16 else model
        chunk = DistributedDataParallel(config, settings, module)
        chunk.vp_stage = model.vp_stage
        chunks.append(chunk)
    config.finalize_model_grads_func = finalize_model_grads
    if overlap.grad_reduce:  # of the last micro-batch only; those before it are local
        no_syncs = [chunk.no_sync for chunk in chunks]
        config.no_sync_func = no_syncs if len(chunks) > 1 else no_syncs[0]
    return chunks


def gather_parameters(chunks: List[DistributedDataParallel]) -> None:
    """Make every rank's weights those of the last update, where a forward pass would be the first to ask for them."""
    for chunk in chunks:
        if chunk.ddp_config.overlap_param_gather:
            chunk.start_param_sync(force_sync=True)
