"""DMMPTs: dynamic masking of well-mastered positive tokens (section 3.3, Eq. 9-10)."""

import math
from typing import Callable

import torch
from torch import Tensor


def mastered_positive_mask(
    log_probs: Tensor,
    entropies: Tensor,
    rewards: Tensor,
    sample_index: Tensor,
    *,
    tau: float,
    sigma: float,
    entropy_scope: str,
    reduce: Callable[[Tensor], Tensor] = lambda sums: sums,
) -> Tensor:
    """True where a token is masked: its sample has reward 1, p >= tau, and the mean entropy is below sigma.

    log_probs, entropies: float [T], detached values of the current policy; entropy is -sum p log p in nats (the
    printed formula lost its minus sign). rewards: [N]. sample_index: int [T]. Returns bool [T].
    entropy_scope `sample`: mean entropy of the token's own sample (H_i as printed); `batch`: mean of all T tokens.
    sigma = inf masks always (the paper's "masking MPTs").
    reduce: sums a tensor [2, N] over the ranks that hold other tokens of the same samples (context parallelism).
    """
    if entropy_scope not in ("sample", "batch"):
        raise ValueError(f"entropy_scope {entropy_scope!r} is not one of ['batch', 'sample']")
    sums = entropies.new_zeros(2, rewards.numel(), dtype=torch.promote_types(entropies.dtype, torch.float32))
    sums[0].index_add_(0, sample_index, entropies.detach().to(sums.dtype))
    sums[1].index_add_(0, sample_index, torch.ones_like(entropies, dtype=sums.dtype))
    sums = reduce(sums)
    if entropy_scope == "batch":
        sums = sums.sum(1, keepdim=True).expand_as(sums)
    low_entropy = sums[0] < sigma * sums[1]
    eligible = low_entropy & (rewards == 1)
    return eligible[sample_index] & (log_probs.detach() >= math.log(tau))
