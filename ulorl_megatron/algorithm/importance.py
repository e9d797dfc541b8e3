"""Importance ratios of partial rollouts (section 3.2, Eq. 8)."""

from typing import Optional

import torch
from torch import Tensor

# Which policy the denominator of the ratio is: the one at the start of the step, or the one that made the token.
_OLD_POLICY = {"pois": "old", "tois": "old", "sais": "behaviour"}


def importance_ratio(
    mode: str, log_probs: Tensor, old_log_probs: Optional[Tensor], behaviour_log_probs: Optional[Tensor]
) -> Tensor:
    """exp(log_probs - those of the old policy), with gradient through log_probs only. All tensors [T].

    mode `tois`: ordinary ratio of samples decoded in one segment; the old policy made the whole of them.
    mode `sais` (Eq. 8): old policy of a token = the one that generated its segment (behaviour_log_probs).
    mode `pois`: old policy of every segment = the policy at the start of the step.
    For `tois` and `pois`, old_log_probs None stands for "the current policy is still the one at the start of the
    step": the ratio is then exactly 1 and carries the gradient of log_probs.
    Raises ValueError for an unknown mode, or for `sais` without behaviour_log_probs.
    """
    if mode not in _OLD_POLICY:
        raise ValueError(f"importance mode {mode!r} is not one of {sorted(_OLD_POLICY)}")
    old = old_log_probs if _OLD_POLICY[mode] == "old" else behaviour_log_probs
    if old is None:
        if mode == "sais":
            raise ValueError("sais needs the log-probs of the policy that generated each segment")
        old = log_probs
    return torch.exp(log_probs - old.detach())
