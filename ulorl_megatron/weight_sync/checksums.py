"""What SGLang's /weights_checker must say of a folder of weights: the servers' tensors against ours.

A server fuses and splits what it loads: q, k and v, gate and up, the experts of a layer; rows or columns over its
tensor-parallel ranks. Its checksum of a tensor on a CPU is the first 8 bytes of the SHA-256 of its elements.
"""

import hashlib
import re
from pathlib import Path
from typing import Any, Dict, Iterator, List, Sequence, Tuple

import torch
from torch import Tensor

from checkpoint_tools.architecture import Architecture
from checkpoint_tools.hf_files import HFReader
from checkpoint_tools.name_map import weights
from ulorl_megatron.errors import UserError
from ulorl_megatron.rollout.client import Endpoint
from ulorl_megatron.weight_sync.receiver import held_checksums, server_layout

_VOCAB_MULTIPLE = 64  # rows to which SGLang pads a vocabulary before it splits it

_FUSED = (  # part of the HF name, of the server's, dimension that is split
    (r"self_attn\.(?:q|k|v)_proj\.", "self_attn.qkv_proj.", 0),
    (r"mlp\.experts\.\d+\.(?:gate|up)_proj\.weight", "mlp.experts.w13_weight", 0),
    (r"mlp\.experts\.\d+\.down_proj\.weight", "mlp.experts.w2_weight", 1),
    (r"mlp\.(?:gate|up)_proj\.", "mlp.gate_up_proj.", 0),
    (r"mlp\.down_proj\.", "mlp.down_proj.", 1),
    (r"self_attn\.o_proj\.", "self_attn.o_proj.", 1),
    (r"embed_tokens\.|lm_head\.", None, 0),
)


def served_checksums(folder: Path, tensor_parallel: int) -> List[Dict[str, str]]:
    """Of every tensor-parallel rank: server's tensor name -> checksum, of the HF directory `folder`.

    Holds for unquantised Qwen3 and Qwen3-MoE on a CPU server. One tensor at a time is in memory.
    """
    arch, reader = Architecture.from_hf(folder), HFReader(folder)
    running: List[Dict[str, Any]] = [{} for _ in range(tensor_parallel)]
    for name in (hf for weight in weights(arch) for hf in weight.hf):
        served, parts = _served(name, reader.read(name), arch, tensor_parallel)
        for digests, part in zip(running, parts, strict=True):
            content = memoryview(part.contiguous().flatten().view(torch.uint8).numpy())
            digests.setdefault(served, hashlib.sha256()).update(content)
    return [{name: digest.digest()[:8].hex() for name, digest in digests.items()} for digests in running]


def differences(expected: List[Dict[str, str]], served: List[Dict[str, str]]) -> Iterator[str]:
    """Where a server's checksums, of its ranks in order, are not the expected ones."""
    for rank, (ours, theirs) in enumerate(zip(expected, served, strict=True)):
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                yield f"{name} on tensor-parallel rank {rank}: {theirs.get(name)}, not {ours.get(name)}"


async def verify_weights(servers: Sequence[Endpoint], folder: Path) -> None:
    """Raises UserError, with the first tensors that differ, unless every server holds the HF directory `folder`.

    GPU servers use a hash of their own, so they are compared with each other only.
    """
    layouts = [await server_layout(server) for server in servers]
    held = [await held_checksums(server) for server in servers]
    on_cpu = all(layout["device"] == "cpu" for layout in layouts)
    expected = {size: served_checksums(folder, size) for size in {la["tp_size"] for la in layouts} if on_cpu}
    for server, layout, checksums in zip(servers, layouts, held, strict=True):
        wanted = expected.setdefault(layout["tp_size"], checksums)
        if found := list(differences(wanted, checksums)):
            raise UserError(
                f"{server.url} does not hold the weights {folder}: {len(found)} tensors differ, first "
                f"{'; '.join(found[:3])}. Nothing was trained on its tokens since the last comparison "
                "(servers.verify_weights_every) that can be trusted; resume from an earlier checkpoint"
            )


def _served(name: str, tensor: Tensor, arch: Architecture, size: int) -> Tuple[str, List[Tensor]]:
    """The server's name of the tensor that an HF tensor goes into, and its part on every rank, in loading order."""
    for pattern, replacement, dim in _FUSED:
        if not re.search(pattern, name):
            continue
        if replacement is None:
            missing = -tensor.size(0) % max(_VOCAB_MULTIPLE, size)
            return name, list(torch.nn.functional.pad(tensor, (0, 0, 0, missing)).chunk(size))
        served = re.sub(pattern, replacement, name)
        if re.search(r"\.[kv]_proj\.", name) and size > arch.num_kv_heads:  # a head on several ranks
            heads = tensor.chunk(arch.num_kv_heads)
            return served, [heads[rank * arch.num_kv_heads // size] for rank in range(size)]
        return served, list(tensor.chunk(size, dim))
    return name, [tensor] * size
