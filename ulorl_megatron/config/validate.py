"""What types cannot say: ranges, and keys that must fit together. Nothing here touches the disk."""

from typing import Iterator, List

from ulorl_megatron.config import positions, sets
from ulorl_megatron.config.schema import (
    Config,
    Importance,
    JudgeConfig,
    Overlong,
    Schedule,
    Stop,
    TransformerImpl,
    VerifierKind,
)

# Flags of a server that follow from keys the trainer reads too.
_SERVER_FLAGS = {
    "--model-path": "model.path",
    "--model": "model.path",
    "--dtype": "model.dtype",
    "--context-length": "rollout.global_max_length and data.max_prompt_length",
    "--json-model-override-args": "model.max_positions or model.yarn_factor and model.yarn_original",
}


def faults(config: Config) -> List[str]:
    """One line per fault, "section.key: what is wrong and what would be right"; empty when there is none."""
    return [
        *_ranges(config),
        *positions.faults(config.model),
        *sets.faults(config.data),
        *_servers(config),
        *_sampling(config),
        *_rewards(config),
        *_algorithm(config),
        *_optimizer(config),
        *_parallel(config),
    ]


def _ranges(c: Config) -> Iterator[str]:
    at_least_one = {
        "run.total_steps": c.run.total_steps,
        "run.processes": c.run.processes,
        "data.max_prompt_length": c.data.max_prompt_length,
        "rollout.global_max_length": c.rollout.global_max_length,
        "rollout.segment_count": c.rollout.segment_count,
        "rollout.prompts_per_step": c.rollout.prompts_per_step,
        "servers.count": c.servers.count,
        "verifier.workers": c.verifier.workers,
        "verifier.judge.votes": c.verifier.judge.votes,
        "verifier.judge.max_tokens": c.verifier.judge.max_tokens,
        "verifier.judge.concurrency": c.verifier.judge.concurrency,
        "verifier.judge.cache_size": c.verifier.judge.cache_size,
        "policy.max_tokens_per_rank": c.policy.max_tokens_per_rank,
        "policy.head_chunk_tokens": c.policy.head_chunk_tokens,
        "policy.updates_per_step": c.policy.updates_per_step,
        "checkpoint.every": c.checkpoint.every,
        "checkpoint.keep_last": c.checkpoint.keep_last,
        "checkpoint.keep_weights": c.checkpoint.keep_weights,
        "evaluation.samples_per_prompt": c.evaluation.samples_per_prompt,
        **{f"policy.parallel.{name}": size for name, size in vars(c.policy.parallel).items()},
    }
    at_least_zero = {
        "rollout.request_retries": c.rollout.request_retries,
        "servers.announced": c.servers.announced,
        "servers.port": c.servers.port,
        "servers.verify_weights_every": c.servers.verify_weights_every,
        "servers.max_restarts": c.servers.max_restarts,
        "verifier.retries": c.verifier.retries,
        "verifier.judge.temperature": c.verifier.judge.temperature,
        "verifier.judge.retries": c.verifier.judge.retries,
        "verifier.judge.hold_s": c.verifier.judge.hold_s,
        "evaluation.every": c.evaluation.every,
        "evaluation.max_prompts": c.evaluation.max_prompts,
        "policy.optimizer.lr": c.policy.optimizer.lr,
        "policy.optimizer.warmup_steps": c.policy.optimizer.warmup_steps,
        "policy.optimizer.decay_steps": c.policy.optimizer.decay_steps,
        "policy.optimizer.min_lr": c.policy.optimizer.min_lr,
        "policy.optimizer.weight_decay": c.policy.optimizer.weight_decay,
        "policy.optimizer.clip_grad": c.policy.optimizer.clip_grad,
        "algorithm.clip_high": c.algorithm.clip_high,
        "dmmpt.sigma": c.dmmpt.sigma,
    }
    above_zero = {
        "rollout.request_timeout_s": c.rollout.request_timeout_s,
        "servers.start_timeout_s": c.servers.start_timeout_s,
        "servers.hang_timeout_s": c.servers.hang_timeout_s,
        "verifier.timeout_s": c.verifier.timeout_s,
        "verifier.judge.timeout_s": c.verifier.judge.timeout_s,
        "policy.optimizer.eps": c.policy.optimizer.eps,
        "algorithm.pois_kl_warning": c.algorithm.pois_kl_warning,
    }
    yield from (f"{key}: {value} is below 1" for key, value in at_least_one.items() if value < 1)
    yield from (f"{key}: {value} is below 0" for key, value in at_least_zero.items() if value < 0)
    yield from (f"{key}: {value} is not above 0" for key, value in above_zero.items() if not value > 0)
    if c.servers.port > 65535 - c.servers.count:
        yield f"servers.port: {c.servers.port} leaves no room for {c.servers.count} ports below 65536"
    for name in ("beta1", "beta2"):
        beta = getattr(c.policy.optimizer, name)
        if not 0 <= beta < 1:
            yield f"policy.optimizer.{name}: {beta} is not in [0, 1)"
    if c.evaluation.every and not c.data.eval:
        yield "data.eval: evaluation.every is above 0, which needs a held-out set"


def _servers(c: Config) -> Iterator[str]:
    if c.servers.urls and c.servers.announced:
        yield "servers.announced: servers.urls has servers already; set one of the two"
    for argument in c.servers.extra_args:
        flag = argument.partition("=")[0]
        if flag in _SERVER_FLAGS:
            yield f"servers.extra_args: {flag} must be what the trainer has; set {_SERVER_FLAGS[flag]}"


def _sampling(c: Config) -> Iterator[str]:
    r, e = c.rollout, c.evaluation
    if r.temperature <= 0:
        yield f"rollout.temperature: {r.temperature}; training needs a temperature above 0 (log-probs are taken at it)"
    if r.top_p != 1:
        yield (
            f"rollout.top_p: {r.top_p}; training needs 1.0, since the server's log-probs are not renormalised for top-p"
        )
    if r.top_k > 0:
        yield (
            f"rollout.top_k: {r.top_k}; training needs -1, since the server's log-probs are not renormalised for top-k"
        )
    if r.group_size < 2:
        yield f"rollout.group_size: {r.group_size}; a group of one has no advantage, take 2 or more"
    if r.segment_count >= 1 and r.global_max_length % r.segment_count:
        yield (
            f"rollout.segment_count: {r.segment_count} does not divide rollout.global_max_length {r.global_max_length}"
        )
    in_flight = r.prompts_per_step * r.group_size
    if r.stop is Stop.enough and not 1 <= r.enough_samples <= in_flight:
        yield (
            f"rollout.enough_samples: {r.enough_samples}; rollout.stop enough needs 1 to {in_flight} "
            "(prompts_per_step x group_size)"
        )
    if r.stop is Stop.segment and r.enough_samples:
        yield f"rollout.enough_samples: {r.enough_samples} counts with rollout.stop enough only; take 0, or that"
    if e.temperature < 0:
        yield f"evaluation.temperature: {e.temperature} is below 0"
    if not 0 < e.top_p <= 1:
        yield f"evaluation.top_p: {e.top_p} is not in (0, 1]"
    if e.top_k == 0 or e.top_k < -1:
        yield f"evaluation.top_k: {e.top_k}; give -1 (off) or 1 and more"


def _rewards(c: Config) -> Iterator[str]:
    judge, e = c.verifier.judge, c.experience
    if c.verifier.kind is VerifierKind.rule:
        given = [key for key, value in vars(judge).items() if value != getattr(JudgeConfig(), key)]
        if given:
            yield f"verifier.judge.{given[0]}: asks no model with verifier.kind rule; take hybrid or generative"
    elif judge.url is None or not judge.url.startswith(("http://", "https://")):
        yield (
            f"verifier.judge.url: {judge.url}; verifier.kind {c.verifier.kind.value} needs the URL of a model, like "
            "http://host:30000/v1"
        )
    if judge.votes > 1 and judge.temperature == 0:
        yield f"verifier.judge.temperature: 0 makes {judge.votes} equal votes; take more, or verifier.judge.votes 1"
    if e.overlong is Overlong.soft and not 1 <= e.overlong_cache <= c.rollout.global_max_length:
        yield (
            f"experience.overlong_cache: {e.overlong_cache}; experience.overlong soft needs 1 to "
            f"rollout.global_max_length {c.rollout.global_max_length}"
        )
    if e.overlong is not Overlong.soft and e.overlong_cache:
        yield f"experience.overlong_cache: {e.overlong_cache} is of experience.overlong soft only; take 0, or that"


def _algorithm(c: Config) -> Iterator[str]:
    a, d = c.algorithm, c.dmmpt
    if a.importance is Importance.tois and c.rollout.segment_count != 1:
        yield (
            f"algorithm.importance: tois is the ratio of samples made in one segment; rollout.segment_count is "
            f"{c.rollout.segment_count}, so take pois or sais"
        )
    if a.importance is Importance.tois and (c.rollout.stop is Stop.enough or c.rollout.overlap):
        yield "algorithm.importance: tois is for samples of one policy; rollout.stop enough and overlap mix several"
    if not 0 <= a.clip_low <= 1:
        yield f"algorithm.clip_low: {a.clip_low} is not in [0, 1]"
    if a.max_engine_mismatch is not None and a.max_engine_mismatch <= 0:
        yield f"algorithm.max_engine_mismatch: {a.max_engine_mismatch} is not above 0; null only logs it"
    if a.tis_cap is not None and a.tis_cap <= 0:
        yield f"algorithm.tis_cap: {a.tis_cap} is not above 0; null turns it off"
    if a.tis_cap is not None and a.importance is Importance.sais:
        yield "algorithm.tis_cap: sais divides by the same log-probs already; take pois or tois, or null"
    if not 0 < d.tau <= 1:
        yield f"dmmpt.tau: {d.tau} is not a probability in (0, 1]"


def _optimizer(c: Config) -> Iterator[str]:
    o = c.policy.optimizer
    if c.policy.overlap.param_gather and not c.policy.overlap.grad_reduce:
        yield "policy.overlap.param_gather: needs policy.overlap.grad_reduce, whose buckets of gradients it gathers by"
    if o.schedule is Schedule.cosine:
        if o.decay_steps <= o.warmup_steps:
            yield (
                f"policy.optimizer.decay_steps: {o.decay_steps}; cosine needs the update at which min_lr is reached, "
                f"after warmup_steps {o.warmup_steps}. run.total_steps x policy.updates_per_step, here "
                f"{c.run.total_steps * c.policy.updates_per_step}, decays over the whole run"
            )
        if o.min_lr > o.lr:
            yield f"policy.optimizer.min_lr: {o.min_lr} is above policy.optimizer.lr {o.lr}"
    elif o.decay_steps or o.min_lr:
        yield "policy.optimizer.schedule: constant; decay_steps and min_lr are of schedule cosine only"


def _parallel(c: Config) -> Iterator[str]:
    p = c.policy.parallel
    if p.virtual_pipeline > 1 and p.pipeline == 1:
        yield f"policy.parallel.virtual_pipeline: {p.virtual_pipeline} needs policy.parallel.pipeline of 2 or more"
    if c.policy.transformer_impl is TransformerImpl.te and c.model.dtype.value == "float32":
        yield "policy.transformer_impl: te runs packed attention in bfloat16 only; set model.dtype to bfloat16"
