"""avg@k: the mean reward of k responses to each held-out problem."""

from dataclasses import dataclass
from typing import Awaitable, Callable, List

import numpy as np

from ulorl_megatron.config.schema import EvaluationConfig
from ulorl_megatron.data import PromptSet
from ulorl_megatron.rollout.client import Finish, Sampling
from ulorl_megatron.rollout.scheduler import SegmentRollout

Judge = Callable[[List[int], str], Awaitable[float]]


@dataclass(frozen=True)
class Evaluation:
    """accuracy: avg@k. problems, samples: how many. mean_length: response tokens. truncated: share without EOS."""

    accuracy: float
    problems: int
    samples: int
    mean_length: float
    truncated: float


async def evaluate(
    rollout: SegmentRollout, problems: PromptSet, config: EvaluationConfig, judge: Judge
) -> Evaluation:
    """Samples config.samples_per_prompt responses a problem and judges those that ended; truncated ones score 0.

    judge: (response ids, reference answer) -> reward; its VerifierFailed is passed on, since an average over fewer
    samples would be another measure.
    """
    count = min(len(problems), config.max_prompts or len(problems))
    prompts = problems.first(count)
    sampling = Sampling(config.temperature, config.top_p, config.top_k)
    responses = await rollout.sample_to_end([p.tokens for p in prompts], config.samples_per_prompt, sampling)
    rewards, lengths, truncated = [], [], []
    for prompt, group in zip(prompts, responses, strict=True):
        for response in group:
            ended = response.finish is Finish.eos
            rewards.append(await judge(response.tokens, prompt.answer) if ended else 0.0)
            lengths.append(len(response.tokens))
            truncated.append(not ended)
    return Evaluation(
        accuracy=float(np.mean(rewards)),
        problems=count,
        samples=len(rewards),
        mean_length=float(np.mean(lengths)),
        truncated=float(np.mean(truncated)),
    )
