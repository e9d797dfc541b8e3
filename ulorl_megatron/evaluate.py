"""avg@k: the mean reward of k responses to each held-out problem."""

import asyncio
from typing import Awaitable, Callable, Dict, List

import numpy as np

from ulorl_megatron.config.schema import EvaluationConfig
from ulorl_megatron.data import PromptSet
from ulorl_megatron.rollout.client import Finish, Sampling
from ulorl_megatron.rollout.scheduler import SegmentRollout

Judge = Callable[[List[int], str], Awaitable[float]]


async def evaluate(
    rollout: SegmentRollout, problems: PromptSet, config: EvaluationConfig, judge: Judge
) -> Dict[str, float]:
    """Samples config.samples_per_prompt responses a problem and judges those that ended; truncated ones score 0.

    judge: (response ids, reference answer) -> reward; its VerifierFailed is passed on, since an average over fewer
    samples would be another measure. Returns the eval/ metrics of monitor.metrics.
    """
    prompts = problems.first(config.max_prompts or len(problems))
    sampling = Sampling(config.temperature, config.top_p, config.top_k)
    groups = await rollout.sample_to_end([p.tokens for p in prompts], config.samples_per_prompt, sampling)
    responses = [(response, prompt.answer) for prompt, group in zip(prompts, groups, strict=True) for response in group]
    ended = [(response, answer) for response, answer in responses if response.finish is Finish.eos]
    rewards = await asyncio.gather(*(judge(response.tokens, answer) for response, answer in ended))
    return {
        "eval/accuracy": sum(rewards) / len(responses),
        "eval/mean_length": float(np.mean([len(response.tokens) for response, _ in responses])),
        "eval/truncated": 1 - len(ended) / len(responses),
    }
