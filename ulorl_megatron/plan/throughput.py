"""The time an optimizer step should take, term by term, if every sample has the longest prompt and response.

Work of one token in the forward pass: 2 FLOP a weight it meets, and 4 x (queries' elements) FLOP for each key it sees,
half the sequence on average. The backward pass takes twice that, attention 2.5 times (its kernels compute the scores
again); full recomputation one forward pass more, selective the attention's; the head's logits are computed twice.

Communication is added to it, none hidden behind it, but for Transformer Engine's context parallelism, whose transfers
run beside the attention, and, with policy.overlap.grad_reduce, the sum of gradients beside the last backward pass. A
collective over more ranks than a node has goes at the network's rate.
"""

from dataclasses import dataclass
from typing import Dict, Iterator, Tuple

from ulorl_megatron.config.layout import padded_vocab_size
from ulorl_megatron.config.schema import Recompute, TransformerImpl
from ulorl_megatron.plan.cards import ATTENTION, EXPERT, GPUS_PER_NODE, LINEAR, LINK, Rates
from ulorl_megatron.plan.layout import Layout
from ulorl_megatron.plan.parameters import parameter_count

NVLINK, NETWORK, HOST = "NVLink", "InfiniBand", "PCIe"


@dataclass(frozen=True)
class Term:
    """seconds of a step on the slowest rank; bound: what more of would shorten it."""

    name: str
    seconds: float
    bound: str


@dataclass(frozen=True)
class Throughput:
    """Of one optimizer step. tokens: trained over all ranks, prompts included. flops: of one token, without what is
    computed again."""

    terms: Tuple[Term, ...]
    tokens: float
    world: int
    flops: float
    peak: float

    @property
    def seconds(self) -> float:
        return sum(term.seconds for term in self.terms)

    @property
    def per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def utilisation(self) -> float:
        """Model FLOPs over the cards' peak."""
        return self.per_second * self.flops / (self.world * self.peak)

    @property
    def shares(self) -> Dict[str, float]:
        """Part of the step that each bound takes, the largest first."""
        sums: Dict[str, float] = {}
        for term in self.terms:
            sums[term.bound] = sums.get(term.bound, 0.0) + term.seconds / self.seconds
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


def throughput(layout: Layout, rates: Rates) -> Throughput:
    """What `layout` should yield on cards with `rates`."""
    micro = [*_compute(layout, rates), *_communication(layout, rates)]
    once_a_micro_batch = sum(term.seconds for term in micro)
    m, p, v = layout.micro_batches, layout.sizes.pipeline, layout.sizes.virtual_pipeline
    terms = [Term(t.name, t.seconds * m, t.bound) for t in micro if t.seconds]
    if p > 1:
        terms.append(Term("pipeline bubble", once_a_micro_batch * (p - 1) / v, "bubble"))
    backward = sum(term.seconds for term in micro if term.bound == "compute") * 2 / 3
    terms += (term for term in _update(layout, rates, backward) if term.seconds)
    tokens = layout.samples * layout.sequence
    return Throughput(tuple(terms), tokens, layout.world, model_flops(layout), rates.peak)


def model_flops(layout: Layout) -> float:
    """Of one token, forward and backward pass: 6 a weight it meets, 12 a query element and key it sees."""
    linear, expert, attention = forward_flops(layout)
    head = 2 * layout.arch.hidden_size * layout.arch.vocab_size
    return 3 * (layout.arch.num_layers * (linear + expert + attention) + head)


def forward_flops(layout: Layout) -> Tuple[float, float, float]:
    """(dense linear layers, experts, attention) FLOP of one token in one layer, over all ranks that share it."""
    arch = layout.arch
    h, q, kv = arch.hidden_size, arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    linear = 2.0 * h * (2 * q + 2 * kv)
    expert = 0.0
    if arch.is_moe:
        linear += 2.0 * h * arch.num_experts
        expert = 2.0 * arch.experts_per_token * 3 * h * arch.moe_intermediate_size
    else:
        linear += 2.0 * 3 * h * arch.intermediate_size
    return linear, expert, 4.0 * q * layout.sequence / 2


def _compute(layout: Layout, rates: Rates) -> Tuple[Term, ...]:
    """Of one micro-batch on the last pipeline stage, the slowest since it has the head."""
    linear, expert, attention = forward_flops(layout)
    again, core = _passes(layout)
    tokens = _tokens(layout)
    # Tokens times their work, shared by the tensor-parallel ranks.
    work = tokens * layout.layers / layout.sizes.tensor / rates.peak
    head = 2.0 * layout.arch.hidden_size * padded_vocab_size(layout.arch, layout.sizes.tensor)
    head *= 4 * tokens / layout.sizes.tensor / rates.peak
    return (
        Term("dense layers", work * linear * (3 + again) / LINEAR, "compute"),
        Term("experts", work * expert * (3 + again) * layout.imbalance / EXPERT, "compute"),
        Term("attention", work * attention * (3.5 + core) / ATTENTION, "compute"),
        Term("log-prob head", head / LINEAR, "compute"),
    )


def _tokens(layout: Layout) -> int:
    """Of one micro-batch of longest samples on one context-parallel rank."""
    return layout.packed * layout.sequence // layout.sizes.context


def _passes(layout: Layout) -> Tuple[int, int]:
    """Forward passes of a layer, and of its core attention, that the backward pass makes again."""
    again = int(layout.recompute is Recompute.full)
    return again, int(layout.recompute is not Recompute.none)


def _communication(layout: Layout, rates: Rates) -> Tuple[Term, ...]:
    """Of one micro-batch."""
    arch, sizes, e = layout.arch, layout.sizes, layout.item
    again, core = _passes(layout)
    tokens = _tokens(layout)
    hidden = tokens * arch.hidden_size * e  # of this rank's tokens, not yet cut by sequence parallelism
    blocks = 1 if arch.is_moe else 2  # linear layers of attention, and of a dense MLP, gather and scatter
    tensor = layout.layers * blocks * (2 + 3 + 2 * again) * hidden
    keys = tokens * 2 * arch.num_kv_heads // sizes.tensor * arch.head_dim * e
    te = layout.impl is TransformerImpl.te  # sends the keys and values again for their gradients, does not keep them
    context = layout.layers * keys * sizes.context * (2 + te + core)
    sent = hidden // sizes.tensor * (arch.experts_per_token or 0) * layout.imbalance
    expert = layout.layers * (4 + 2 * again) * sent
    boundary = 2 * sizes.virtual_pipeline * hidden // sizes.tensor if sizes.pipeline > 1 else 0
    seconds, bound = _collective(context, sizes.context, sizes.tensor, rates)
    if te:
        beside = _compute(layout, rates)[2].seconds
        seconds = max(0.0, seconds - beside)
    return (
        _term("tensor parallel", tensor, sizes.tensor, 1, rates),
        Term("context parallel", seconds, bound),
        _all_to_all("expert parallel", expert, sizes.expert, sizes.expert_tensor, rates),
        _term("expert tensor parallel", expert * sizes.expert_tensor, sizes.expert_tensor, 1, rates),
        Term("pipeline parallel", boundary / _link(layout.world, rates)[0], _link(layout.world, rates)[1]),
    )


def _update(layout: Layout, rates: Rates, last_backward: float) -> Iterator[Term]:
    """Once a step: float32 gradients are summed over the replicas, and the new weights gathered.

    last_backward: seconds of the last micro-batch's backward pass. The stage with most parameters counts.
    """
    stages = [parameter_count(layout.arch, layout.sizes, stage) for stage in range(layout.sizes.pipeline)]
    sizes, count = layout.sizes, max(stages, key=lambda stage: stage.total)
    parts = (
        ("", count.dense, layout.dense_replicas, sizes.tensor),
        ("experts' ", count.experts, layout.expert_replicas, sizes.expert * sizes.expert_tensor),
    )
    hidden = last_backward if layout.overlap_gradients else 0.0
    for whose, elements, replicas, stride in parts:
        seconds, bound = _collective(4 * elements, replicas, stride, rates)
        yield Term(f"{whose}gradients", max(0.0, seconds - hidden), bound)
        hidden = max(0.0, hidden - seconds)
        yield Term(f"{whose}weights", *_collective(layout.item * elements, replicas, stride, rates))
    if layout.offload:  # two moments there and back
        moments = count.dense / layout.dense_replicas + count.experts / layout.expert_replicas
        yield Term("offloaded moments", 16 * moments / (rates.host * LINK), HOST)


def _term(name: str, size: float, ranks: int, stride: int, rates: Rates) -> Term:
    return Term(name, *_collective(size, ranks, stride, rates))


def _collective(size: float, ranks: int, stride: int, rates: Rates) -> Tuple[float, str]:
    """(seconds, bound) of gathering or reducing `size` bytes in all over `ranks` that are `stride` apart."""
    link, bound = _link(ranks * stride if ranks > 1 else 1, rates)
    return size * (ranks - 1) / ranks / link, bound


def _all_to_all(name: str, size: float, ranks: int, stride: int, rates: Rates) -> Term:
    """Every rank sends `size` bytes in all, evenly to all ranks, itself included; nodes and links at the same time."""
    near = min(ranks, max(1, GPUS_PER_NODE // stride))
    inside = size * (near - 1) / ranks / (rates.nvlink * LINK)
    outside = size * (ranks - near) / ranks / (rates.network * LINK)
    return Term(name, max(inside, outside), NETWORK if outside > inside else NVLINK)


def _link(span: int, rates: Rates) -> Tuple[float, str]:
    """Bytes a second, and which link, of ranks that reach over `span` neighbouring ranks."""
    if span <= GPUS_PER_NODE:
        return rates.nvlink * LINK, NVLINK
    return rates.network * LINK, NETWORK
