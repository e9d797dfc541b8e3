"""Log-probs and entropies of given tokens without full logits: vocab-parallel, chunked over tokens, recomputed.

Logits of one 131072-token sequence over 151936 words are 79.7 GB in float32. Here only `chunk` tokens' logits
exist at a time, in the forward as in the backward pass, and only this rank's part of the vocabulary.
"""

from dataclasses import dataclass
from typing import Tuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

Scores = Tuple[Tensor, Tensor, Tensor, Tensor]


class _Scores(torch.autograd.Function):
    """(hidden [T, H], weight [V / tp, H], labels [T]) -> log-probs (with graph) and entropies, tempered, then raw.

    The gradient of `hidden` is this rank's vocabulary's share: the caller's gather sums it over
    tensor-parallel ranks. words: this rank's rows that are real words, the first of them word number `first`.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, first, words, temperature, raw, chunk, group) -> Scores:
        scales = (1 / temperature, 1.0) if raw else (1 / temperature,)
        inside = (labels >= first) & (labels < first + words)
        rows = (labels - first).clamp(0, words - 1)
        results = hidden.new_zeros((len(scales), 3, hidden.size(0)), dtype=torch.float32)
        for part in _parts(hidden.size(0), chunk):
            logits = (hidden[part] @ weight[:words].t()).float()
            largest = logits.amax(-1)
            dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
            logits -= largest[:, None]
            label = logits.gather(-1, rows[part, None])[:, 0] * inside[part]
            sums = torch.stack([_sums(logits, label, scale) for scale in scales])
            dist.all_reduce(sums, group=group)
            total, weighted, label = sums.unbind(1)
            log_total = total.log()
            scale = torch.tensor(scales, device=logits.device)[:, None]
            results[:, :, part] = torch.stack(
                [label - log_total, log_total - weighted / total, log_total + largest * scale], dim=1
            )
        ctx.save_for_backward(hidden, weight, rows, inside, results[0, 2])
        ctx.words, ctx.temperature, ctx.chunk = words, temperature, chunk
        log_probs, entropies = results[0, 0].clone(), results[0, 1]
        raw_log_probs, raw_entropies = results[-1, 0], results[-1, 1]
        ctx.mark_non_differentiable(entropies, raw_log_probs, raw_entropies)
        return log_probs, entropies, raw_log_probs, raw_entropies

    @staticmethod
    def backward(ctx, grad, *_):
        hidden, weight, rows, inside, log_normalizer = ctx.saved_tensors
        words = weight[: ctx.words]
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for part in _parts(hidden.size(0), ctx.chunk):
            logits = (hidden[part] @ words.t()).float()
            grad_logits = logits.div_(ctx.temperature).sub_(log_normalizer[part, None]).exp_().neg_()
            grad_logits.scatter_add_(-1, rows[part, None], inside[part, None].float())
            grad_logits *= grad[part, None] / ctx.temperature
            grad_logits = grad_logits.to(hidden.dtype)
            grad_hidden[part] = grad_logits @ words
            grad_weight[: ctx.words] += grad_logits.t() @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), *[None] * 7


def _parts(count: int, chunk: int):
    return (slice(start, min(start + chunk, count)) for start in range(0, count, chunk))


def _sums(logits: Tensor, label: Tensor, scale: float) -> Tensor:
    """[3, T]: sum e^x, sum x e^x, and the label's x, with x = scale * logits (shifted, at most 0)."""
    x = logits * scale
    exp = x.exp()
    return torch.stack([exp.sum(-1), (x * exp).sum(-1), label * scale])


@dataclass(frozen=True)
class ScoreHead:
    """What replaces the output layer's logits: a GPTModel `output_processor`.

    temperature: of log-probs and entropies. raw: whether the mastery scores are at temperature 1 instead.
    vocab_size: real words; the padding rows behind them never count (SkyRL#2259). chunk: tokens at a time.
    """

    temperature: float
    raw: bool
    vocab_size: int
    chunk: int

    def __call__(self, hidden_states, output_layer, output_weight, config, context, **unused) -> Scores:
        """Scores of the labels at the selected positions, as four [T] float32 tensors in TokenScores' order.

        hidden_states: [s, 1, H], s this rank's tokens (sequence-parallel shard where tensor > 1). context: a
        MicroBatch; its `positions` index the rows after the gather, its `labels` are what follows them.
        """
        group = output_layer.tp_group
        if config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(hidden_states, group=group)
        weight = output_layer.weight if output_weight is None else output_weight
        first = group.rank() * weight.size(0)
        return _Scores.apply(
            hidden_states[:, 0].index_select(0, context.positions),
            weight,
            context.labels,
            first,
            min(weight.size(0), self.vocab_size - first),
            self.temperature,
            self.raw,
            self.chunk,
            group,
        )
