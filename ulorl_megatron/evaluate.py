"""avg@k: the mean reward of k responses to each held-out problem."""

import asyncio
from typing import Awaitable, Callable, Dict, List

import numpy as np

from ulorl_megatron.config.schema import EvaluationConfig
from ulorl_megatron.data import PromptSet
from ulorl_megatron.rollout.client import Finish, Sampling
from ulorl_megatron.rollout.scheduler import SegmentRollout
from ulorl_megatron.verifier import Verdict

# (prompt ids, response ids, reference answer) -> verdict
Judge = Callable[[List[int], List[int], str], Awaitable[Verdict]]


async def evaluate(
    rollout: SegmentRollout, problems: PromptSet, config: EvaluationConfig, judge: Judge
) -> Dict[str, float]:
    """Samples config.samples_per_prompt responses a problem and judges those that ended; truncated ones score 0.

    judge: see Judge; its VerifierFailed is passed on, since an average over fewer
    samples would be another measure. Returns the eval/ metrics of monitor.metrics.
    """
    prompts = problems.first(config.max_prompts or len(problems))
    sampling = Sampling(config.temperature, config.top_p, config.top_k)
    groups = await rollout.sample_to_end([p.tokens for p in prompts], config.samples_per_prompt, sampling)
    responses = [(response, prompt) for prompt, group in zip(prompts, groups, strict=True) for response in group]
    ended = [(response, prompt) for response, prompt in responses if response.finish is Finish.eos]
    verdicts = await asyncio.gather(
        *(judge(prompt.tokens, response.tokens, prompt.answer) for response, prompt in ended)
    )
    return {
        "eval/accuracy": sum(verdict.reward for verdict in verdicts) / len(responses),
        "eval/mean_length": float(np.mean([len(response.tokens) for response, _ in responses])),
        "eval/truncated": 1 - len(ended) / len(responses),
    }
