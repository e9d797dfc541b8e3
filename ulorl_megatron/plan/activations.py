"""Bytes of activations: what autograd keeps of a layer between forward and backward pass, and what it needs besides.

Counted tensor by tensor from Megatron-Core's layers as policy/model.py builds them, and compared with measured peaks on
a CPU in tests/plan/test_activations.py. A GPU's kernels keep less of norms and grouped queries: those lines are read
from the sources of torch and Transformer Engine, not measured.

Letters: t tokens of this rank in attention (its context-parallel share), s = t / tensor (its sequence-parallel share),
n tokens at this rank's experts, h hidden size, q and kv elements of a token's query and key heads on this rank, i
hidden units of an MLP or expert on this rank, e bytes of an element.
"""

from collections import Counter
from dataclasses import dataclass
from math import ceil
from typing import Dict

from ulorl_megatron.config.layout import padded_vocab_size, tile_words
from ulorl_megatron.config.schema import Recompute, TransformerImpl
from ulorl_megatron.plan.layout import Layout

_QUERY_BLOCK = 2048  # policy/attention.py: rows of queries that see an explicit mask at a time

ATTENTION, EXPERTS, MLP, NORMS, INPUTS = "attention", "experts", "MLP", "norms and router", "layer inputs"


@dataclass(frozen=True)
class LayerActivations:
    """Bytes of one layer for one micro-batch.

    kept: by part, until its backward pass. recomputed: what the backward pass makes again first, all of it at once.
    work: what forward or backward pass of a layer need at their fullest moment besides.
    """

    kept: Dict[str, int]
    recomputed: int
    work: int


class _Sizes:
    """The letters above."""

    def __init__(self, layout: Layout):
        arch, sizes = layout.arch, layout.sizes
        self.e, self.h = layout.item, arch.hidden_size
        self.t = layout.tokens
        self.s = layout.tokens // sizes.tensor
        self.heads, self.groups = arch.num_heads // sizes.tensor, arch.num_kv_heads // sizes.tensor
        self.d = arch.head_dim
        self.q, self.kv = self.heads * self.d, self.groups * self.d
        if arch.is_moe:
            self.sent = self.s * arch.experts_per_token
            self.n = ceil(self.sent * sizes.expert_tensor * layout.imbalance)
            self.i = arch.moe_intermediate_size // sizes.expert_tensor
            self.local_experts = arch.num_experts // sizes.expert
        else:
            self.i = arch.intermediate_size // sizes.tensor


def layer_activations(layout: Layout) -> LayerActivations:
    """Of one transformer layer under layout.recompute."""
    z = _Sizes(layout)
    core = _core_attention(layout, z)
    every = _kept_without_recompute(layout, z)
    work = max(_forward_work(layout, z), _backward_work(layout, z))
    if layout.recompute is Recompute.none:
        every[ATTENTION] += core
        return LayerActivations(dict(every), 0, work)
    if layout.recompute is Recompute.full:
        every[ATTENTION] += core
        # The input of the layer is kept; its output is held while its backward pass runs.
        return LayerActivations({INPUTS: z.s * z.h * z.e}, sum(every.values()), work + z.s * z.h * z.e)
    # Selective: the inputs of the core attention are kept and it is computed again alone, when the MLP's are gone.
    inputs = z.t * (z.q + z.kv) * z.e
    if not _keeps_mixed(layout, z):
        inputs += z.t * (z.q + 2 * z.kv) * z.e  # the value is a part of the joint projection, which stays for it
    every[ATTENTION] += inputs
    again = core - z.t * z.q * z.e + 4 * z.t * z.q * z.e  # the query is there; gradients of the three and the output
    return LayerActivations(dict(every), 0, max(work, again - every[MLP] - every[EXPERTS]))


def _kept_without_recompute(layout: Layout, z: _Sizes) -> Counter:
    """By part, all that a layer keeps but for the core attention's own."""
    kept: Counter = Counter()
    kept[NORMS] = 2 * _norm(layout, z.s, z.h, 1)
    projection_input, attention_output = z.s * z.h * z.e, z.t * z.q * z.e
    joint = z.t * (z.q + 2 * z.kv) * z.e if _keeps_mixed(layout, z) else 0
    apart = 0  # copied out of the joint projection for the norms of queries and keys
    if layout.impl is TransformerImpl.te:
        apart = z.t * (z.q + z.kv) * z.e
    elif joint and 1 < z.groups < z.heads:
        apart = z.t * z.q * z.e
    head_norms = _norm(layout, z.t, z.q, z.heads, stored=True) + _norm(layout, z.t, z.kv, z.groups, stored=True)
    rope = 4 * z.t * z.d * z.e  # sine and cosine of the pack, for queries and for keys
    kept[ATTENTION] = projection_input + joint + apart + head_norms + rope + attention_output
    if not layout.arch.is_moe:
        # The joint projection, silu(gate), up + 0, their product.
        kept[MLP] = z.s * z.h * z.e + 5 * z.t * z.i * z.e
        return kept
    k = layout.arch.experts_per_token
    kept[NORMS] += z.s * z.h * z.e + z.s * k * 32  # the router's input; indices and probabilities of its choice
    # Sorted inputs; the four of the dense MLP, and the product once more, weighted by the router's float32.
    kept[EXPERTS] = z.n * (z.h * z.e + 5 * z.i * z.e + z.i * z.e + 4)
    return kept


def _norm(layout: Layout, rows: int, width: int, norms: int, stored: bool = False) -> int:
    """An RMSNorm of `width` elements a row, in `norms` parts. stored: its input is kept by others in its own dtype."""
    scale = 4 * rows * norms
    if layout.cuda:
        return scale + (0 if stored else rows * width * layout.item)
    # The CPU's kernel is made of plain operations in float32: its input in float32 and the normalised one stay.
    return scale + rows * width * (4 if stored and layout.item == 4 else 8)


def _keeps_mixed(layout: Layout, z: _Sizes) -> bool:
    """Whether query, key and value as they leave their joint projection stay: norm or attention keep a part of it."""
    if layout.impl is TransformerImpl.te:
        return False
    return layout.cuda or layout.item == 4 or z.heads == z.groups


def _core_attention(layout: Layout, z: _Sizes) -> int:
    """Kept of softmax(q k^T) v: its inputs after rope, the log-sums, the output before it is joined."""
    cp, length = layout.sizes.context, layout.sequence
    query = output = z.t * z.q * z.e
    log_sums = 4 * z.t * z.heads
    if layout.impl is TransformerImpl.te:
        return query + 2 * z.t * z.kv * z.e + log_sums  # its output is the next projection's input
    if layout.cuda:
        keys = z.t * z.kv * z.e
        if cp > 1:
            # Gathered keys and values; a mask of the queries, as bytes and as the kernel's bias, over half the keys.
            keys = 2 * cp * z.t * z.kv * z.e + z.t * length // 2 * (1 + z.e)
        return query + keys + output + log_sums
    repeats = z.heads > z.groups
    if cp == 1:
        keys = 2 * query if repeats else z.t * z.kv * z.e
        return query + keys + output + log_sums
    gathered = 2 * cp * z.t * z.kv * z.e
    seen = sum(_keys_seen(length, cp)) * (z.t * cp // length)
    copies = 2 * seen * z.q * z.e if repeats else 0
    return query + gathered + copies + z.t * length // 2 * z.e + output + log_sums


def _keys_seen(length: int, cp: int):
    """Keys of each block of queries of one sequence, on a context-parallel rank; the first chunk is one block."""
    chunk = length // (2 * cp)
    yield chunk
    for offset in range(0, chunk, _QUERY_BLOCK):
        yield (2 * cp - 1) * chunk + min(offset + _QUERY_BLOCK, chunk)


def _forward_work(layout: Layout, z: _Sizes) -> int:
    """The fullest moment of a layer's forward pass, besides what it keeps: in the experts, where tokens lie twice."""
    if not layout.arch.is_moe:
        return 2 * z.t * z.h * z.e
    one = z.h * z.e  # bytes of a token
    sorts = z.local_experts > 1
    work = z.sent * one + z.n * one
    if sorts:
        work += z.n * one  # the experts' outputs, apart, joined, and sorted back: two of the three at a time
    if layout.sizes.expert * layout.sizes.expert_tensor > 1:
        work += z.n * one + z.sent * one  # what came from the other ranks, and what comes back from them
    return work


def _backward_work(layout: Layout, z: _Sizes) -> int:
    """The fullest moment of a layer's backward pass, besides what is kept: in its MLP, gradients of what it keeps."""
    gathered = z.t * z.h * z.e if layout.sizes.tensor > 1 else 0
    if layout.arch.is_moe:
        return z.s * z.h * z.e + 2 * z.n * z.h * z.e + gathered
    return z.s * z.h * z.e + 2 * z.t * z.i * z.e + gathered


def head_work(layout: Layout) -> int:
    """Bytes of the log-prob head (policy/head.py) at its fullest moment, the last norm included."""
    z = _Sizes(layout)
    words = padded_vocab_size(layout.arch, layout.sizes.tensor) // layout.sizes.tensor
    chunk = min(layout.head_chunk, layout.tokens)
    rows = z.t * z.h * z.e  # the scored positions
    kept = _norm(layout, z.s, z.h, 1) + rows
    tile = chunk * min(words, tile_words(chunk, "cuda" if layout.cuda else "cpu"))
    forward = 16 * tile + (rows if layout.sizes.tensor > 1 else 0)  # logits, scaled, e^x, x e^x, in float32
    gradient = tile * (4 + (z.e if z.e < 4 else 0)) + 2 * tile // chunk * z.h * 4  # and the tile's words, twice
    weight = words * z.h * z.e
    backward = 2 * rows + z.t * z.h * 4 + weight + gradient  # the scored rows, and their gradient in float32
    return kept + max(forward, backward)
