"""How far tokens are from the policy that trains on them, by the age of the weights that made them (section 3.2)."""

from typing import Dict, Tuple

import torch
from torch import Tensor

# Name -> first and last age, in weight versions.
AGES: Dict[str, Tuple[int, int]] = {"0": (0, 0), "1": (1, 1), "2-3": (2, 3), "4-up": (4, 2**31)}
AVERAGES = ("ratio_deviation", "kl", "outside_clip", "reward", "advantage")


def staleness_sums(
    log_probs: Tensor,
    behaviour_log_probs: Tensor,
    ages: Tensor,
    rewards: Tensor,
    advantages: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> Dict[str, Tensor]:
    """Sums over the tokens of each age in AGES, "age-<age>/<name>" -> float64 scalar; name: tokens, or of AVERAGES.

    All arguments [T], without graph; rewards and advantages of each token's sample. r = exp(log_probs -
    behaviour_log_probs), whatever ratio the loss uses. ratio_deviation: |r - 1|. kl: r log r - r + 1, which averages to
    KL(now || when sampled), nats, and is never negative. outside_clip: 1 if r is outside [1 - clip_low, 1 + clip_high].
    """
    log_ratio = (log_probs - behaviour_log_probs).double()
    ratio = log_ratio.exp()
    columns = {
        "tokens": torch.ones_like(ratio),
        "ratio_deviation": (ratio - 1).abs(),
        "kl": ratio * log_ratio - ratio + 1,
        "outside_clip": ((ratio < 1 - clip_low) | (ratio > 1 + clip_high)).double(),
        "reward": rewards.double(),
        "advantage": advantages.double(),
    }
    return {
        f"age-{age}/{name}": values[(ages >= first) & (ages <= last)].sum()
        for age, (first, last) in AGES.items()
        for name, values in columns.items()
    }
