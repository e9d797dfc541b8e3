"""The objectives the policy is trained with: UloRL's, and cross-entropy for a supervised warm start.

An objective maps a TokenBatch and its TokenScores to (loss_sum, num_tokens, sums, maxima). loss_sum is a sum over
tokens; the policy divides by the step's tokens over all ranks and micro-batches. sums and maxima are float64 scalars
reduced over ranks by addition and by maximum.
"""

import math
from dataclasses import dataclass
from typing import Callable, Dict, Optional, Tuple

import torch
from torch import Tensor

from ulorl_megatron.algorithm.batch import TokenBatch, TokenScores
from ulorl_megatron.algorithm.importance import importance_ratio
from ulorl_megatron.algorithm.loss import policy_loss
from ulorl_megatron.algorithm.mastery import mastered_positive_mask
from ulorl_megatron.algorithm.staleness import staleness_sums

Reduce = Callable[[Tensor], Tensor]
Result = Tuple[Tensor, int, Dict[str, Tensor], Dict[str, Tensor]]


class RatioNotOne(RuntimeError):
    """POIS or TOIS at the only update of a step, and yet the ratio is not exactly 1: a fault in the program."""


@dataclass(frozen=True)
class Mastery:
    """How mastered positive tokens are masked (Eq. 9-10). mode: off | always | dynamic."""

    mode: str
    tau: float
    sigma: float
    entropy_scope: str

    @property
    def needs_whole_batch(self) -> bool:
        """The mask depends on tokens of other micro-batches, so it has to be taken in a pass of its own."""
        return self.mode == "dynamic" and self.entropy_scope == "batch"

    def mask(
        self, log_probs: Tensor, entropies: Tensor, rewards: Tensor, sample_index: Tensor, reduce: Reduce
    ) -> Tensor:
        """bool [T]; arguments as in mastered_positive_mask."""
        if self.mode == "off":
            return torch.zeros_like(sample_index, dtype=torch.bool)
        return mastered_positive_mask(
            log_probs,
            entropies,
            rewards,
            sample_index,
            tau=self.tau,
            sigma=math.inf if self.mode == "always" else self.sigma,
            entropy_scope=self.entropy_scope,
            reduce=reduce,
        )


@dataclass(frozen=True)
class UloRLObjective:
    """Eq. 7 with the ratio of `importance` and the mask of `mastery` (Eq. 10).

    tis_cap: every token counts min(p of the policy at the start of the step / p when sampled, tis_cap) times (truncated
    importance sampling against the difference of the two engines, and of the weights since); None: once.
    Raises RatioNotOne if pois or tois runs without old log-probs (one update a step) and a ratio differs from 1.
    """

    importance: str
    clip_low: float
    clip_high: float
    mastery: Mastery
    tis_cap: Optional[float] = None

    def __call__(self, batch: TokenBatch, scores: TokenScores, reduce: Reduce) -> Result:
        masked = batch.masked
        if masked is None:
            masked = self.mastery.mask(
                scores.mastery_log_probs, scores.mastery_entropies, batch.rewards, batch.sample_index, reduce
            )
        ratio = importance_ratio(self.importance, scores.log_probs, batch.old_log_probs, batch.behaviour_log_probs)
        if self.importance != "sais" and batch.old_log_probs is None and (ratio != 1).any():
            raise RatioNotOne(f"{int((ratio != 1).sum())} of {ratio.numel()} ratios are not 1")
        loss, counts = policy_loss(
            scores.log_probs,
            ratio,
            batch.advantages,
            batch.sample_index,
            masked,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            num_tokens=1,
            weights=self._truncated_weights(scores, batch),
        )
        with torch.no_grad():
            difference = (scores.log_probs - batch.behaviour_log_probs).abs().double()
            positive = batch.rewards[batch.sample_index] == 1
            mastered = scores.mastery_log_probs >= math.log(self.mastery.tau)
            current = difference[batch.ages == 0]
            zero = difference.new_zeros(1)
            sums = {name: count.double() for name, count in counts.items()}
            sums |= {
                "loss": loss.double(),
                "entropy": scores.entropies.double().sum(),
                "mastered_tokens": (positive & mastered).sum().double(),
                "ratio_deviation": (ratio - 1).abs().double().sum(),
                "mismatch": current.sum(),
                "mismatch_tokens": zero.sum() + current.numel(),
                "staleness": difference.sum(),
            }
            sums |= staleness_sums(
                scores.log_probs,
                batch.behaviour_log_probs,
                batch.ages,
                batch.rewards[batch.sample_index],
                batch.advantages[batch.sample_index],
                clip_low=self.clip_low,
                clip_high=self.clip_high,
            )
            maxima = {
                "mismatch": torch.cat([current, zero]).max(),
                "ratio_deviation": torch.cat([(ratio - 1).abs().double(), zero]).max(),
            }
        return loss, scores.log_probs.numel(), sums, maxima

    def _truncated_weights(self, scores: TokenScores, batch: TokenBatch) -> Optional[Tensor]:
        if self.tis_cap is None:
            return None
        old = scores.log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
        return (old - batch.behaviour_log_probs).exp().clamp(max=self.tis_cap)


def cross_entropy_objective(batch: TokenBatch, scores: TokenScores, reduce: Reduce) -> Result:
    """Supervised: minus the sum of the response tokens' log-probs."""
    loss = -scores.log_probs.sum()
    return loss, scores.log_probs.numel(), {"loss": loss.detach().double()}, {}
