"""Weights by way of the file system: every rank writes the HF tensors it owns, rank 0 publishes the folder."""

import shutil
from pathlib import Path
from typing import Dict, List

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from checkpoint_tools.companions import copy_companions
from checkpoint_tools.hf_files import write_index
from ulorl_megatron.config.positions import changed_fields
from ulorl_megatron.config.schema import ModelConfig
from ulorl_megatron.launch import Ranks
from ulorl_megatron.policy import Policy

_VERSION_GLOB = "step-*"


def publish_weights(
    policy: Policy, ranks: Ranks, model: ModelConfig, weights: Path, version: int, keep: int
) -> Path:
    """Writes weights/step-<version>, a Hugging Face folder that servers can load; returns its path on every rank.

    Collective. model: its config.json, with its positions, and its tokenizer are written beside the weights. keep: how
    many versions stay. A reader never sees half a folder: it is written under another name and renamed when all ranks
    are done and every shard was opened again and holds what it should (verl#6842). It is not forced to the disk: after
    a power failure the next start writes it anew.
    """
    final = weights / f"step-{version:06d}"
    partial = weights / f".partial-{version:06d}"
    ranks.only_first(lambda: _start(partial))
    tensors = dict(policy.hf_tensors())
    shard = f"model-{ranks.rank + 1:05d}-of-{ranks.world_size:05d}.safetensors"
    if tensors:
        save_file(tensors, partial / shard, metadata={"format": "pt"})
    sizes = {name: tensor.numel() * tensor.element_size() for name, tensor in tensors.items()}
    shards = ranks.gather((shard, sizes))
    # Rank 0 always has tensors: the embedding is its.
    ranks.only_first(lambda: _finish(shards, model, next(iter(tensors.values())).dtype, partial, final, keep))
    return final


def _start(partial: Path) -> None:
    if partial.exists():  # left by a run that was killed here
        shutil.rmtree(partial)
    partial.mkdir(parents=True)


def _finish(shards: List, model: ModelConfig, dtype: torch.dtype, partial: Path, final: Path, keep: int) -> None:
    weight_map: Dict[str, str] = {}
    for shard, sizes in shards:
        if not sizes:
            continue
        with safe_open(partial / shard, framework="pt") as file:
            missing = set(sizes) - set(file.keys())
        twice = set(sizes) & set(weight_map)
        if missing or twice:
            raise RuntimeError(f"{partial / shard}: missing {sorted(missing)[:3]}, written twice {sorted(twice)[:3]}")
        weight_map |= dict.fromkeys(sizes, shard)
    total = sum(sum(sizes.values()) for _, sizes in shards)
    write_index(partial, weight_map, total)
    copy_companions(Path(model.path), partial, dtype, changed_fields(model))
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    folders = sorted(final.parent.glob(_VERSION_GLOB))
    current = folders.index(final)
    for other in folders[current + 1 :] + folders[: max(current + 1 - keep, 0)]:  # later ones: a kill took them back
        shutil.rmtree(other)
