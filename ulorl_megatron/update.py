"""The policy update of one step: masks and old log-probs where a pass of their own is needed, then the optimizer."""

from dataclasses import replace
from typing import Dict, List, Optional

import torch

from ulorl_megatron.algorithm.batch import TrainSample
from ulorl_megatron.algorithm.objective import Mastery, UloRLObjective
from ulorl_megatron.algorithm.staleness import AGES, AVERAGES
from ulorl_megatron.config.schema import Config, Importance
from ulorl_megatron.errors import UserError
from ulorl_megatron.policy import Policy, UpdateStats


def build_objective(config: Config) -> UloRLObjective:
    """The objective that `config` describes."""
    a, d = config.algorithm, config.dmmpt
    mastery = Mastery(d.mode.value, d.tau, d.sigma, d.entropy_scope.value)
    return UloRLObjective(a.importance.value, a.clip_low, a.clip_high, mastery, a.tis_cap)


def update_policy(policy: Policy, samples: List[TrainSample], config: Config) -> UpdateStats:
    """Trains on all samples of the step in `policy.updates_per_step` optimizer steps; collective over the ranks.

    samples: the same non-empty list on every rank. With one update the ratio of pois and tois is 1 and no further
    pass is made; with more, the policy at the start of the step scores the samples first.
    Raises UserError when the trainer's log-probs are further from the servers' than algorithm.max_engine_mismatch.
    """
    objective = build_objective(config)
    several = config.policy.updates_per_step > 1
    needs_old = several and config.algorithm.importance is not Importance.sais
    if needs_old or objective.mastery.needs_whole_batch:
        samples = _score_first(policy, samples, objective.mastery, needs_old)
    stats = [policy.update(part, objective) for part in _parts(samples, config.policy.updates_per_step)]
    _check_engines_agree(stats[0], config)
    return sum(stats[1:], stats[0])


def update_metrics(stats: Optional[UpdateStats]) -> Dict[str, float]:
    """Names and values of monitor.metrics; nothing for a step without an update."""
    if stats is None:
        return {}
    tokens, sums = max(stats.tokens, 1), stats.sums
    metrics = {
        "train/tokens": stats.tokens,
        "train/loss": sums["loss"] / tokens,
        "train/entropy": sums["entropy"] / tokens,
        "train/masked_share": sums["masked_tokens"] / tokens,
        "train/mastered_share": sums["mastered_tokens"] / tokens,
        "train/clipped_share": sums["clipped_tokens"] / tokens,
        "train/ratio_deviation": sums["ratio_deviation"] / tokens,
        "train/staleness": sums["staleness"] / tokens,
        "train/grad_norm": stats.grad_norm,
        "train/lr": stats.lr,
        "train/micro_batches": stats.micro_batches,
    }
    if sums["mismatch_tokens"]:
        metrics["train/mismatch_mean"] = sums["mismatch"] / sums["mismatch_tokens"]
        metrics["train/mismatch_max"] = stats.maxima["mismatch"]
    for age in AGES:
        if of_age := sums[f"age-{age}/tokens"]:
            metrics[f"age-{age}/token_share"] = of_age / tokens
            metrics |= {f"age-{age}/{name}": sums[f"age-{age}/{name}"] / of_age for name in AVERAGES}
    return metrics


def _parts(samples: List[TrainSample], count: int) -> List[List[TrainSample]]:
    """At most `count` non-empty parts of about equal size."""
    return [samples[i::count] for i in range(min(count, len(samples)))]


def _score_first(
    policy: Policy, samples: List[TrainSample], mastery: Mastery, needs_old: bool
) -> List[TrainSample]:
    """Fills old_log_probs, and the mask where it depends on the whole batch."""
    scores = policy.score(samples)
    if needs_old:
        samples = [replace(s, old_log_probs=x.log_probs) for s, x in zip(samples, scores, strict=True)]
    if mastery.needs_whole_batch:
        lengths = torch.tensor([s.response_length for s in samples])
        masked = mastery.mask(
            torch.cat([x.mastery_log_probs for x in scores]),
            torch.cat([x.mastery_entropies for x in scores]),
            torch.tensor([s.reward for s in samples]),
            torch.repeat_interleave(torch.arange(len(samples)), lengths),
            reduce=lambda sums: sums,
        )
        samples = [replace(s, masked=m) for s, m in zip(samples, masked.split(lengths.tolist()), strict=True)]
    return samples


def _check_engines_agree(stats: UpdateStats, config: Config) -> None:
    limit = config.algorithm.max_engine_mismatch
    tokens = stats.sums["mismatch_tokens"]
    if limit is None or not tokens:
        return
    mean = stats.sums["mismatch"] / tokens
    if not mean <= limit:
        raise UserError(
            f"trainer and servers disagree: mean |log-prob difference| {mean:.2e} nats over {tokens:.0f} tokens of the "
            f"last segments, above algorithm.max_engine_mismatch {limit:.1e}. The weights in the servers, the dtype or "
            f"the position settings differ. This step is not saved."
        )
