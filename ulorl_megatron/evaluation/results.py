"""The figures of one policy on one data set, from its attempts."""

from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence

import numpy as np

from ulorl_megatron.attempts import Attempt
from ulorl_megatron.evaluation.statistics import Estimate, estimate, pass_at_k, powers_up_to


@dataclass(frozen=True)
class Results:
    """attempts_each: the k. accuracy: avg@k. pass_at: k -> pass@k, on problems with k judged attempts.

    scores: mean reward of each problem over its judged attempts, in the order of the set; None if none was judged.
    truncated, unjudged: shares of all responses. lengths: quantiles 0.1, 0.5, 0.9, the mean and the maximum, in tokens.
    """

    problems: int
    attempts_each: int
    accuracy: Estimate
    pass_at: Dict[int, Estimate]
    scores: List[Optional[float]]
    truncated: float
    unjudged: float
    lengths: Dict[str, float]


def results(groups: Sequence[Sequence[Attempt]]) -> Results:
    """groups: the attempts at each problem, as many for each. Raises ValueError if not one could be judged."""
    every = [attempt for group in groups for attempt in group]
    judged = [[attempt.reward for attempt in group if attempt.reward is not None] for group in groups]
    scores = [float(np.mean(rewards)) if rewards else None for rewards in judged]
    known = [score for score in scores if score is not None]
    if not known:
        raise ValueError("not one response could be judged")
    size = len(groups[0])
    passes = {}
    for k in powers_up_to(size):
        full = [pass_at_k(len(rewards), int(sum(rewards)), k) for rewards in judged if len(rewards) >= k]
        if full:
            passes[k] = estimate(full)
    tokens = np.array([attempt.tokens for attempt in every])
    return Results(
        problems=len(groups),
        attempts_each=size,
        accuracy=estimate(known),
        pass_at=passes,
        scores=scores,
        truncated=sum(not attempt.finished for attempt in every) / len(every),
        unjudged=sum(attempt.reward is None for attempt in every) / len(every),
        lengths={
            "mean": float(tokens.mean()),
            **{name: float(np.quantile(tokens, q)) for name, q in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9))},
            "max": float(tokens.max()),
        },
    )
