"""Core attention in plain torch for packed sequences, with grouped queries and context parallelism.

Packed (THD) layout: the sequences of a micro-batch lie one after the other, each padded to a multiple of what
the parallel layout needs. Under context parallelism of size C every sequence is cut into 2C chunks of equal
length and rank r holds chunks r and 2C-1-r (zigzag), so that causal attention costs every rank the same.
"""

from typing import List, Tuple

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

_QUERY_BLOCK = 2048  # rows for which the CPU may hold an explicit causal mask


def zigzag_positions(length: int, rank: int, size: int) -> Tensor:
    """Positions, within a sequence of `length` tokens, that context-parallel rank `rank` of `size` holds; int64.

    length must be a multiple of 2 * size (any length if size is 1).
    """
    if size == 1:
        return torch.arange(length)
    chunk, rest = divmod(length, 2 * size)
    if rest:
        raise ValueError(f"a sequence of {length} tokens cannot be cut into {2 * size} chunks")
    first = torch.arange(rank * chunk, (rank + 1) * chunk)
    return torch.cat([first, first + (2 * size - 1 - 2 * rank) * chunk])


def lengths_of(packed: PackedSeqParams) -> List[int]:
    """Padded length of every sequence, over all context-parallel ranks."""
    boundaries = packed.cu_seqlens_q_padded.tolist()
    return [end - start for start, end in zip(boundaries, boundaries[1:])]  # noqa: B905


class PackedCausalAttention(MegatronModule):
    """softmax(q k^T) v within each packed sequence, causal. A `core_attention` submodule without parameters.

    The padding of a sequence lies behind its tokens, so causality alone keeps it out of them. Sequences are
    taken one by one: no mask over the whole pack exists. With context parallelism keys and values are
    gathered from the ranks (their gradients are reduce-scattered) and queries stay local.
    """

    def __init__(
        self,
        config,
        layer_number,
        attn_mask_type,
        attention_type,
        attention_dropout=None,
        softmax_scale=None,
        cp_comm_type=None,
        pg_collection=None,
    ):
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
        self.cp_group = groups.cp
        self.softmax_scale = softmax_scale or config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask=None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params: PackedSeqParams = None,
    ) -> Tensor:
        """query: [t, heads, d], key and value: [t, groups, d], after rope; t: local tokens. Returns [t, heads * d]."""
        if packed_seq_params is None or packed_seq_params.qkv_format != "thd":
            raise ValueError("this attention takes packed (thd) sequences only")
        lengths = lengths_of(packed_seq_params)
        size = self.cp_group.size()
        if size > 1:
            key, value = self._gather(key, value, lengths)
        outputs = []
        for q, k, v in zip(
            query.split([n // size for n in lengths]), key.split(lengths), value.split(lengths), strict=True
        ):
            chunk = k.size(0) // (2 * size)
            if size == 1:
                outputs.append(self._attend(q, k, v, start=0))
                continue
            for part, number in zip(
                q.split(chunk), (self.cp_group.rank(), 2 * size - 1 - self.cp_group.rank()), strict=True
            ):
                outputs.append(self._attend(part, k, v, start=number * chunk))
        return torch.cat(outputs).flatten(1)

    def _gather(self, key: Tensor, value: Tensor, lengths: List[int]) -> Tuple[Tensor, Tensor]:
        """Local [t, groups, d] -> all tokens of every sequence, in order."""
        size = self.cp_group.size()
        gathered = gather_from_sequence_parallel_region(torch.stack([key, value], dim=1), group=self.cp_group)
        held = torch.cat([_global_rows(lengths, rank, size) for rank in range(size)])
        order = torch.empty_like(held)
        order[held] = torch.arange(held.numel())
        return gathered.index_select(0, order.to(gathered.device)).unbind(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, start: int) -> Tensor:
        """Queries at positions start, start + 1, ... of one sequence against its keys; [n, heads, d]."""
        if start == 0:
            keys = query.size(0)
            return self._sdpa(query, key[:keys], value[:keys], is_causal=True)
        blocks = []
        for offset in range(0, query.size(0), _QUERY_BLOCK):
            q = query[offset : offset + _QUERY_BLOCK]
            keys = start + offset + q.size(0)
            mask = torch.ones(q.size(0), keys, dtype=torch.bool, device=q.device).tril(keys - q.size(0))
            blocks.append(self._sdpa(q, key[:keys], value[:keys], attn_mask=mask))
        return torch.cat(blocks)

    def _sdpa(self, query: Tensor, key: Tensor, value: Tensor, **masking) -> Tensor:
        if not query.is_cuda and key.size(1) != query.size(1):
            # torch's CPU flash kernel knows no grouped queries, and the path it falls back to keeps all scores.
            repeats = query.size(1) // key.size(1)
            key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            q, k, v, scale=self.softmax_scale, enable_gqa=q.size(1) != k.size(1), **masking
        )
        return out.squeeze(0).transpose(0, 1)


def _global_rows(lengths: List[int], rank: int, size: int) -> Tensor:
    """Rows of the pack (all context-parallel ranks together) that `rank` holds, in its local order."""
    start, rows = 0, []
    for length in lengths:
        rows.append(start + zigzag_positions(length, rank, size))
        start += length
    return torch.cat(rows)
