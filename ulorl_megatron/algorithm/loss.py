"""Token-level clipped policy loss (Eq. 7 and 10)."""

from typing import Dict, Optional, Tuple

import torch
from torch import Tensor


def policy_loss(
    log_probs: Tensor,
    ratio: Tensor,
    advantages: Tensor,
    sample_index: Tensor,
    masked: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    num_tokens: float,
    weights: Optional[Tensor] = None,
) -> Tuple[Tensor, Dict[str, Tensor]]:
    """-(1 / num_tokens) sum over unmasked tokens of min(r A, clip(r, 1 - clip_low, 1 + clip_high) A); no KL term.

    log_probs, ratio: float [T]; the gradient flows through ratio. advantages: [N]. sample_index: int [T].
    masked: bool [T], True = left out of the sum. num_tokens: the denominator, sum |o_i| over all response tokens of
    the step, masked ones included, on all data-parallel ranks and micro-batches. weights: float [T], what each token's
    term is multiplied by, without graph; None: 1.
    Returns the scalar loss and counts (int64 scalars): clipped_tokens (unmasked tokens whose gradient the clip took
    away), masked_tokens, tokens.
    """
    a = advantages[sample_index].to(ratio.dtype)
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    objective = torch.minimum(ratio * a, clipped * a)
    if weights is not None:
        objective = objective * weights
    # where() and not a product: a masked token with an infinite ratio must not turn the sum into NaN.
    loss = -torch.where(masked, torch.zeros_like(objective), objective).sum() / num_tokens
    with torch.no_grad():
        clip_active = ~masked & (clipped * a < ratio * a)
        stats = {
            "clipped_tokens": clip_active.sum(),
            "masked_tokens": masked.sum(),
            "tokens": torch.tensor(log_probs.numel(), device=log_probs.device),
        }
    return loss, stats
