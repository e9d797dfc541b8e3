"""The evaluation every so many steps of training, on the servers that decode anyway."""

import asyncio
from typing import Awaitable, Callable, Dict, List, Optional

import numpy as np

from ulorl_megatron.config.schema import EvaluationConfig
from ulorl_megatron.data import PromptSet
from ulorl_megatron.errors import UserError
from ulorl_megatron.evaluation.statistics import pass_at_k
from ulorl_megatron.rollout.client import Finish, Generation, Sampling
from ulorl_megatron.rollout.scheduler import SegmentRollout
from ulorl_megatron.verifier import Verdict, VerifierFailed

# (prompt ids, response ids, reference answer) -> verdict
Judge = Callable[[List[int], List[int], str], Awaitable[Verdict]]


async def evaluate(
    rollout: SegmentRollout, sets: Dict[str, PromptSet], config: EvaluationConfig, judge: Judge
) -> Dict[str, float]:
    """The eval/ metrics of monitor.metrics: of config.samples_per_prompt responses to each problem of each set.

    Truncated responses score 0; those the judge gave up on count in eval/unjudged only. With several sets the metrics
    are means over the sets, and each set has its own with its name behind: eval/accuracy/NAME.
    Raises UserError if not one response of a set could be judged.
    """
    metrics = {name: await _of_set(rollout, problems, config, judge) for name, problems in sets.items()}
    for name, found in metrics.items():
        if "accuracy" not in found:
            raise UserError(f"data.eval: not one response to {name} could be judged; is it right for verifier.kind?")
    kinds = next(iter(metrics.values()))
    overall = {f"eval/{kind}": float(np.mean([found[kind] for found in metrics.values()])) for kind in kinds}
    if len(metrics) == 1:
        return overall
    return overall | {f"eval/{kind}/{name}": value for name, found in metrics.items() for kind, value in found.items()}


async def _of_set(
    rollout: SegmentRollout, problems: PromptSet, config: EvaluationConfig, judge: Judge
) -> Dict[str, float]:
    k = config.samples_per_prompt
    prompts = problems.first(config.max_prompts or len(problems))
    sampling = Sampling(config.temperature, config.top_p, config.top_k)
    groups = await rollout.sample_to_end([prompt.tokens for prompt in prompts], k, sampling)

    async def reward(prompt: List[int], response: Generation, answer: str) -> Optional[float]:
        if response.finish is not Finish.eos:
            return 0.0
        try:
            return (await judge(prompt, response.tokens, answer)).reward
        except VerifierFailed:
            return None

    answers = [(prompt, response) for prompt, group in zip(prompts, groups, strict=True) for response in group]
    rewards = await asyncio.gather(*(reward(p.tokens, response, p.answer) for p, response in answers))
    judged = [[r for r in rewards[i : i + k] if r is not None] for i in range(0, len(rewards), k)]
    responses = [response for _, response in answers]
    metrics = {
        "mean_length": float(np.mean([len(response.tokens) for response in responses])),
        "truncated": sum(response.finish is not Finish.eos for response in responses) / len(responses),
        "unjudged": rewards.count(None) / len(rewards),
    }
    if any(judged):
        metrics["accuracy"] = float(np.mean([np.mean(group) for group in judged if group]))
        # Of problems with fewer judged responses, pass@k of those there are.
        metrics["pass_at_k"] = float(np.mean([pass_at_k(len(g), int(sum(g)), len(g)) for g in judged if g]))
    return metrics
