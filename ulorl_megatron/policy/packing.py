"""Samples -> micro-batches: which rank takes which samples, and the packed tensors of each.

All ranks compute the same plan from the same samples. A sample of n tokens is a sequence of n - 1 inputs,
each with the next token as its label, so no label can cross into the next sequence (Megatron-LM#3551). Only
the positions that predict response tokens are scored.
"""

import heapq
import math
from dataclasses import dataclass
from typing import List, Optional, Sequence

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from checkpoint_tools.architecture import Architecture
from ulorl_megatron.algorithm.batch import TokenBatch, TrainSample
from ulorl_megatron.policy.attention import zigzag_positions


@dataclass(frozen=True)
class PackingRules:
    """budget: input tokens (padding included) of one micro-batch over all its context-parallel ranks; a
    longer sample gets a micro-batch of its own. data_parallel, context_parallel, tensor_parallel: sizes.
    multiple: the number of micro-batches must be a multiple of it (interleaved pipelines). lockstep: so many
    neighbouring data-parallel ranks wait for each other in every micro-batch, not only at the end of the step.
    quadratic: cost of a token pair of one sequence relative to that of a token."""

    budget: int
    data_parallel: int
    context_parallel: int = 1
    tensor_parallel: int = 1
    multiple: int = 1
    lockstep: int = 1
    quadratic: float = 0.0

    @property
    def unit(self) -> int:
        """Sequences are padded to a multiple of it: zigzag chunks, and equal sequence-parallel shards."""
        return self.tensor_parallel * (2 * self.context_parallel if self.context_parallel > 1 else 1)

    def padded(self, sample: TrainSample) -> int:
        """Input tokens of the sample, padding included."""
        return math.ceil((sample.tokens.numel() - 1) / self.unit) * self.unit

    def cost(self, length: int) -> float:
        """Of one sequence, in units of one token's linear work."""
        return length * (1 + self.quadratic * length)


def attention_share(arch: Architecture) -> float:
    """Work of one (query, key) pair over that of one token in the linear layers, of a whole model.

    Multiplications: 2 * heads * head_dim a pair and layer, causal attention has length / 2 keys a query.
    """
    queries, groups = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    attention = arch.hidden_size * (2 * queries + 2 * groups)
    width = arch.experts_per_token * arch.moe_intermediate_size if arch.num_experts else arch.intermediate_size
    layer = attention + 3 * arch.hidden_size * width
    linear = arch.num_layers * layer + arch.hidden_size * arch.vocab_size
    return arch.num_layers * queries / linear


def plan(samples: Sequence[TrainSample], rules: PackingRules) -> List[List[List[int]]]:
    """plan[rank][i]: indices of the samples in micro-batch i of data-parallel rank `rank`.

    Every rank gets the same number of micro-batches, some perhaps empty (slime#1860). Groups of ranks in
    lockstep get samples of equal cost, and so do the micro-batches that a group runs at the same time.
    """
    lengths = [rules.padded(s) for s in samples]
    groups = _share(lengths, rules)
    tokens = max(sum(min(lengths[i], rules.budget) for i in members) for members in groups)
    at_least = math.ceil(tokens / (rules.budget * rules.lockstep))
    count = math.ceil(max(at_least, 1) / rules.multiple) * rules.multiple
    while None in (bins := [_fill(members, lengths, count * rules.lockstep, rules) for members in groups]):
        count += rules.multiple
    return [rank for group in bins for rank in _spread(group, lengths, rules)]


def _share(lengths: List[int], rules: PackingRules) -> List[List[int]]:
    """The samples of each group of ranks in lockstep: the costliest sample left goes to the cheapest group."""
    groups: List[List[int]] = [[] for _ in range(rules.data_parallel // rules.lockstep)]
    cheapest = [(0.0, g) for g in range(len(groups))]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        cost, g = cheapest[0]
        groups[g].append(i)
        heapq.heapreplace(cheapest, (cost + rules.cost(lengths[i]), g))
    return groups


def _spread(bins: List[List[int]], lengths: List[int], rules: PackingRules) -> List[List[List[int]]]:
    """The micro-batches of each rank of a group: those of like cost run at the same time, totals are evened out."""
    costs = [sum(rules.cost(lengths[i]) for i in members) for members in bins]
    by_cost = sorted(range(len(bins)), key=lambda b: (-costs[b], b))
    ranks: List[List[List[int]]] = [[] for _ in range(rules.lockstep)]
    totals = [0.0] * rules.lockstep
    for start in range(0, len(bins), rules.lockstep):
        row = by_cost[start : start + rules.lockstep]
        for rank, chosen in zip(sorted(range(len(ranks)), key=lambda r: (totals[r], r)), row, strict=True):
            ranks[rank].append(sorted(bins[chosen]))
            totals[rank] += costs[chosen]
    return ranks


def _fill(order: List[int], lengths: List[int], count: int, rules: PackingRules) -> Optional[List[List[int]]]:
    """The samples in `count` bins of like cost, or None if they do not fit. order: from the longest on."""
    bins: List[List[int]] = [[] for _ in range(count)]
    tokens, costs = [0] * count, [0.0] * count
    for i in order:
        fitting = [b for b in range(count) if not bins[b] or tokens[b] + lengths[i] <= rules.budget]
        if not fitting:
            return None
        best = min(fitting, key=lambda b: costs[b])
        bins[best].append(i)
        tokens[best] += lengths[i]
        costs[best] += rules.cost(lengths[i])
    return bins


@dataclass
class MicroBatch:
    """The tensors of one micro-batch on one rank; t: its tokens on this context-parallel rank.

    input_ids, position_ids: int64 [1, t]. packed: sequence boundaries, over all context-parallel ranks.
    positions: int64 [T], rows of the t that predict response tokens. labels: int64 [T], those tokens.
    batch: what the objective sees of them. members: indices in the step's list of the samples (empty for a
    filler). offsets: for each of its samples, int64, which tokens of the response this rank holds.
    """

    input_ids: Tensor
    position_ids: Tensor
    packed: PackedSeqParams
    positions: Tensor
    labels: Tensor
    batch: TokenBatch
    members: List[int]
    offsets: List[Tensor]


def build(
    samples: Sequence[TrainSample],
    members: List[int],
    rules: PackingRules,
    context_rank: int,
    device: torch.device,
) -> MicroBatch:
    """The micro-batch of samples[i] for i in members, as context-parallel rank `context_rank` holds it.

    Without members it is one sequence of padding without a response, so that this rank takes part in
    collectives. Raises ValueError for a sample without a prompt token (nothing predicts its first response
    token).
    """
    chosen = [samples[i] for i in members] or [_filler(samples[0], rules.unit)]
    if any(s.prompt_length < 1 for s in chosen):
        raise ValueError("a sample has no prompt token")
    lengths = [rules.padded(s) for s in chosen]
    held = [zigzag_positions(n, context_rank, rules.context_parallel) for n in lengths]
    scored = [(h >= s.prompt_length - 1) & (h < s.tokens.numel() - 1) for s, h in zip(chosen, held, strict=True)]
    offsets = [h[m] - (s.prompt_length - 1) for s, h, m in zip(chosen, held, scored, strict=True)]

    def per_token(name: str) -> Optional[Tensor]:
        values = [getattr(s, name) for s in chosen]
        if any(v is None for v in values):
            return None
        return torch.cat([v[o] for v, o in zip(values, offsets, strict=True)]).to(device)

    inputs = [F.pad(s.tokens[:-1], (0, n + 1 - s.tokens.numel())) for s, n in zip(chosen, lengths, strict=True)]
    batch = TokenBatch(
        sample_index=torch.cat([torch.full_like(o, i) for i, o in enumerate(offsets)]).to(device),
        rewards=torch.tensor([s.reward for s in chosen], dtype=torch.float32, device=device),
        advantages=torch.tensor([s.advantage for s in chosen], dtype=torch.float32, device=device),
        behaviour_log_probs=per_token("behaviour_log_probs"),
        ages=per_token("ages"),
        old_log_probs=per_token("old_log_probs"),
        masked=per_token("masked"),
    )
    return MicroBatch(
        input_ids=torch.cat([x[h] for x, h in zip(inputs, held, strict=True)])[None].to(device),
        position_ids=torch.cat(held)[None].to(device),
        packed=pack_lengths(lengths, device),
        positions=torch.cat(scored).nonzero()[:, 0].to(device),
        labels=torch.cat([s.tokens[s.prompt_length + o] for s, o in zip(chosen, offsets, strict=True)]).to(device),
        batch=batch,
        members=members,
        offsets=offsets,
    )


def _filler(like: TrainSample, length: int) -> TrainSample:
    """A sample of `length` inputs and no response, with the optional tensors that `like` has."""
    none = torch.zeros(0)
    return TrainSample(
        sample_id=-1,
        tokens=torch.zeros(length + 1, dtype=torch.int64),
        prompt_length=length + 1,
        reward=0.0,
        advantage=0.0,
        behaviour_log_probs=none,
        ages=none.long(),
        old_log_probs=None if like.old_log_probs is None else none,
        masked=None if like.masked is None else none.bool(),
    )


def pack_lengths(lengths: List[int], device: torch.device) -> PackedSeqParams:
    """Boundaries of the padded sequences.

    max_seqlen is the true longest sequence: Megatron's rope takes frequencies as long as the whole pack for
    packed offsets (Megatron-LM#5243), which only a pack of one sequence may look like.
    """
    boundaries = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        cu_seqlens_q_padded=boundaries,
        cu_seqlens_kv_padded=boundaries,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
    )
