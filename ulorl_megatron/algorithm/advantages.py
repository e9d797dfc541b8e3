"""Group-relative advantages (Eq. 4)."""

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, group_ids: Tensor, eps: float = 1e-6) -> Tensor:
    """(r - mean) / (std + eps) within each group, std with Bessel's correction (Eq. 4).

    rewards: float [N]. group_ids: int [N], any values. Returns float [N].
    A group whose rewards are all equal has advantage exactly 0: decided by comparing rewards, since the float
    standard deviation of equal numbers need not be 0 (NeMo-RL#4158). That covers groups of one.
    """
    if rewards.shape != group_ids.shape or rewards.dim() != 1:
        raise ValueError(f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must both be [N]")
    advantages = torch.zeros_like(rewards)
    for group in group_ids.unique():
        members = group_ids == group
        r = rewards[members]
        if (r != r[0]).any():
            advantages[members] = (r - r.mean()) / (r.std(correction=1) + eps)
    return advantages
