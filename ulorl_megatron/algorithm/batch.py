"""What the objective sees: the flat token layout, and where a sample of a step comes from."""

from dataclasses import dataclass
from typing import Optional

import torch


@dataclass
class TrainSample:
    """One complete sample of a step, as every rank receives it.

    tokens: int64 [P + R], prompt then response. prompt_length: P. advantage, reward: of the sample.
    behaviour_log_probs: float32 [R], from the server, at the sampling temperature.
    old_log_probs: float32 [R] from the policy at the start of the step; None where no pass was needed.
    masked: bool [R], the mastered-token mask where it was taken over the whole batch beforehand; else None.
    ages: int64 [R], how many weight versions ago each response token was made; 0: by those of this step's rollout.
    """

    sample_id: int
    tokens: torch.Tensor
    prompt_length: int
    reward: float
    advantage: float
    behaviour_log_probs: torch.Tensor
    ages: torch.Tensor
    old_log_probs: Optional[torch.Tensor] = None
    masked: Optional[torch.Tensor] = None

    @property
    def response_length(self) -> int:
        return self.tokens.numel() - self.prompt_length


@dataclass
class TokenBatch:
    """T response tokens of N samples (of one micro-batch), tokens of a sample in order.

    sample_index: int64 [T], its sample. rewards, advantages: [N]. behaviour_log_probs: [T]. old_log_probs: [T] or
    None. masked: bool [T] if the mastered-token mask was taken beforehand, else None (the objective takes it).
    ages: int64 [T]. Under context parallelism T counts this rank's tokens only; N is the same on all ranks.
    """

    sample_index: torch.Tensor
    rewards: torch.Tensor
    advantages: torch.Tensor
    behaviour_log_probs: torch.Tensor
    ages: torch.Tensor
    old_log_probs: Optional[torch.Tensor] = None
    masked: Optional[torch.Tensor] = None


@dataclass
class TokenScores:
    """What the policy's head says of each response token: [T] each, float32.

    log_probs: at the sampling temperature, with graph. entropies: at the sampling temperature, without graph.
    mastery_log_probs, mastery_entropies: what the mastered-token test uses (tempered or raw), without graph.
    """

    log_probs: torch.Tensor
    entropies: torch.Tensor
    mastery_log_probs: torch.Tensor
    mastery_entropies: torch.Tensor
