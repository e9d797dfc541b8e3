"""Log-probs and entropies of given tokens without full logits: vocab-parallel, in tiles, recomputed.

Logits of one 131072-token sequence over 151936 words are 79.7 GB in float32. Here only a tile of `chunk` tokens times
some of this rank's words exists at a time, in the forward as in the backward pass; sums over the words are kept up to
date as the tiles pass. Computing the logits twice makes four matrix products of three.
"""

from dataclasses import dataclass
from typing import Iterator, Tuple

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from ulorl_megatron.config.layout import tile_words

Scores = Tuple[Tensor, Tensor, Tensor, Tensor]

class _Scores(torch.autograd.Function):
    """(hidden [T, H], weight [V / tp, H], labels [T]) -> log-probs (with graph) and entropies, tempered, then raw.

    The gradient of `hidden` is this rank's vocabulary's share: the caller's gather sums it over
    tensor-parallel ranks. words: this rank's rows that are real words, the first of them word number `first`.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, first, words, temperature, raw, chunk, group) -> Scores:
        scales = (1 / temperature, 1.0) if raw else (1 / temperature,)
        labels = labels - first  # rows of the weight, where this rank has them
        sums = _Sums(hidden.size(0), scales, hidden.device)
        for block in _parts(words, tile_words(chunk, hidden.device.type)):
            for part in _parts(hidden.size(0), chunk):
                sums.add((hidden[part] @ weight[block].t()).float(), labels[part] - block.start, part)
        log_probs, entropies, log_normalizers = sums.results(group)
        ctx.save_for_backward(hidden, weight, labels, log_normalizers[0])
        ctx.words, ctx.temperature, ctx.chunk = words, temperature, chunk
        raw_log_probs = log_probs[-1].clone() if raw else log_probs[0].clone()
        outputs = log_probs[0], entropies[0], raw_log_probs, entropies[-1].clone()
        ctx.mark_non_differentiable(*outputs[1:])
        return outputs

    @staticmethod
    def backward(ctx, grad, *_):
        hidden, weight, labels, log_normalizers = ctx.saved_tensors
        scored = grad.nonzero()[:, 0]  # a masked token, or one without advantage, has no gradient
        if not scored.numel():
            return torch.zeros_like(hidden), torch.zeros_like(weight), *[None] * 7
        rows, labels, log_normalizers = hidden[scored], labels[scored], log_normalizers[scored, None]
        grad = grad[scored, None] / ctx.temperature
        grad_rows = torch.zeros_like(rows, dtype=torch.float32)
        grad_weight = torch.empty_like(weight)
        grad_weight[ctx.words :] = 0
        for block in _parts(ctx.words, tile_words(ctx.chunk, hidden.device.type)):
            words, grad_words = weight[block], None
            for part in _parts(scored.numel(), ctx.chunk):
                logits = (rows[part] @ words.t()).float()
                probs = logits.mul_(1 / ctx.temperature).sub_(log_normalizers[part]).exp_()
                tokens, columns = _inside(labels[part] - block.start, words.size(0))
                probs[tokens, columns] -= 1
                grad_logits = probs.mul_(-grad[part]).to(words.dtype)
                grad_rows[part] += grad_logits @ words
                product = grad_logits.t() @ rows[part]
                grad_words = product if grad_words is None else grad_words.float().add_(product)
            grad_weight[block] = grad_words
        grad_hidden = torch.zeros_like(hidden)
        grad_hidden[scored] = grad_rows.to(hidden.dtype)
        return grad_hidden, grad_weight, *[None] * 7


class _Sums:
    """Running sums over the words of e^x and x e^x, x a scaled logit less the largest of its token so far.

    largest: [T], unscaled. total, weighted: [scales, T]. label: [T], the label's logit, 0 where this rank has it not.
    """

    def __init__(self, tokens: int, scales: Tuple[float, ...], device: torch.device):
        self._scales = torch.tensor(scales, device=device)[:, None]
        self._largest = torch.full((tokens,), -torch.inf, device=device)
        self._total, self._weighted = torch.zeros((2, len(scales), tokens), device=device)
        self._label = torch.zeros(tokens, device=device)

    def add(self, logits: Tensor, columns: Tensor, part: slice) -> None:
        """logits [t, v] of the tokens `part`, overwritten; columns [t]: their labels', outside [0, v) elsewhere."""
        tokens, inside = _inside(columns, logits.size(1))
        self._label[part][tokens] = logits[tokens, inside]
        self._shift(torch.maximum(self._largest[part], logits.amax(-1)), part)
        logits -= self._largest[part, None]
        for i, scale in enumerate(self._scales[:, 0].tolist()):
            x = logits if scale == 1 else logits * scale
            exp = x.exp()
            self._total[i, part] += exp.sum(-1)
            self._weighted[i, part] += torch.linalg.vecdot(x, exp)

    def _shift(self, largest: Tensor, part: slice) -> None:
        """Have the sums of the tokens `part` refer to a larger logit."""
        down = (self._largest[part] - largest) * self._scales  # -inf before the first tile
        factor = down.exp()
        self._total[:, part] *= factor
        self._weighted[:, part] *= factor
        self._weighted[:, part] += torch.where(down.isinf(), 0, down) * self._total[:, part]
        self._largest[part] = largest

    def results(self, group: dist.ProcessGroup) -> Tuple[Tensor, Tensor, Tensor]:
        """(log-probs, entropies, log of sum e^(scaled logit)) over all ranks' words, [scales, T] each."""
        largest = self._largest.clone()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        self._shift(largest, slice(None))
        sums = torch.cat([self._total, self._weighted, self._label[None]])
        dist.all_reduce(sums, group=group)
        total, weighted = sums[:-1].chunk(2)
        log_total = total.log()
        log_probs = (sums[-1] - largest) * self._scales - log_total
        return log_probs, log_total - weighted / total, log_total + largest * self._scales


def _inside(columns: Tensor, size: int) -> Tuple[Tensor, Tensor]:
    """(i, columns[i]) where columns is in [0, size)."""
    tokens = ((columns >= 0) & (columns < size)).nonzero()[:, 0]
    return tokens, columns[tokens]


def _parts(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


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
