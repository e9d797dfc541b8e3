"""HF weights into this rank's model chunks, and back. What maps to what is checkpoint_tools' knowledge alone."""

from typing import Dict, Iterator, List, Optional, Tuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from checkpoint_tools import layouts
from checkpoint_tools.architecture import Architecture
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.hf_files import HFReader
from checkpoint_tools.name_map import Weight, by_name, canonical_name


def local_parameters(
    models: List[GPTModel], config: TransformerConfig, arch: Architecture
) -> Iterator[Tuple[str, Tensor]]:
    """(canonical name, parameter) of every parameter on this rank; names count layers and experts globally."""
    experts = (arch.num_experts or 0) // config.expert_model_parallel_size
    for model in models:
        layer_offset = get_transformer_layer_offset(config, vp_stage=model.vp_stage)
        expert_offset = experts * mpu.get_expert_model_parallel_rank()
        for name, parameter in model.named_parameters():
            yield canonical_name(name, layer_offset=layer_offset, expert_offset=expert_offset), parameter


@torch.no_grad()
def load_hf(models: List[GPTModel], config: TransformerConfig, arch: Architecture, path: str) -> None:
    """Fill every parameter of `models` from the HF directory `path`; each rank reads what it holds.

    Raises CheckpointError for missing, misshapen or unreadable tensors, and for one that no parameter is made of.
    """
    table = by_name(arch)
    known = {hf for weight in table.values() for hf in weight.hf}
    if arch.tie_embeddings:
        known.add("lm_head.weight")  # some files hold the tied tensor under both names
        # The last pipeline stage has a copy of its own.
        table["output_layer.weight"] = table["embedding.word_embeddings.weight"]
    reader = HFReader(path)
    if unread := reader.entries.keys() - known:  # Megatron-LM#5844, Megatron-Bridge#3740
        raise CheckpointError(f"{path}: {min(unread)} ({len(unread)} such) belongs to no {arch.model_type} parameter")
    for name, parameter in local_parameters(models, config, arch):
        weight = table[name]
        full = layouts.to_megatron(weight, arch, [reader.read(hf) for hf in weight.hf])
        group = _shard_group(weight)
        if weight.vocab:
            full = layouts.pad_vocab(full, parameter.size(0) * group.size())
        parameter.copy_(layouts.shard(weight, full, group.rank(), group.size()))


def export_hf(models: List[GPTModel], config: TransformerConfig, arch: Architecture) -> Iterator[Tuple[str, Tensor]]:
    """(HF name, full tensor on the CPU): over all ranks, every tensor exactly once, in model order.

    Collective over the ranks that share a tensor. The work is spread over them; data-parallel replicas yield
    nothing. A tensor may share memory with the model: it is good until the next update.
    """
    local: Dict[str, Tensor] = dict(local_parameters(models, config, arch))
    for index, (name, weight) in enumerate(by_name(arch).items()):
        if name not in local or _replica(weight) != 0:
            continue
        group = _shard_group(weight)
        owner = index % group.size()
        full = _gather(weight, local[name].detach(), group, owner)
        if full is not None:
            yield from zip(weight.hf, layouts.to_hf(weight, arch, full.cpu()), strict=True)


def _shard_group(weight: Weight) -> dist.ProcessGroup:
    """The ranks that hold the parts (or, where nothing is split, copies) of the weight."""
    if weight.expert is not None:
        return mpu.get_expert_tensor_parallel_group()
    return mpu.get_tensor_model_parallel_group()


def _replica(weight: Weight) -> int:
    """Which of the data-parallel copies of the weight this rank holds."""
    if weight.expert is not None:
        return mpu.get_expert_data_parallel_rank()
    return mpu.get_data_parallel_rank(with_context_parallel=True)


def _gather(weight: Weight, part: Tensor, group: dist.ProcessGroup, owner: int) -> Optional[Tensor]:
    """The full parameter on rank `owner` of the group, None on the others."""
    if weight.parallel is None or group.size() == 1:
        return part if group.rank() == owner else None
    parts = [torch.empty_like(part) for _ in range(group.size())] if group.rank() == owner else None
    dist.gather(part.contiguous(), parts, group=group, group_dst=owner)
    return None if parts is None else layouts.unshard(weight, parts)
