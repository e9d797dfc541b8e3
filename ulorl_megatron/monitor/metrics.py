"""The names of all that is measured, each with its meaning. TensorBoard and metrics.jsonl use these."""

from typing import Dict

from ulorl_megatron.algorithm.staleness import AGES

METRICS: Dict[str, str] = {
    "reward/complete": "mean reward of the samples completed in this step; truncated ones count 0",
    "reward/issued": "mean reward of samples issued in the newest step of which none is unfinished, nor of any before: "
    "reward/complete leans to short answers while the pools fill, this one never does",
    "reward/mean": "mean reward of the samples trained in this step, all of groups with contrast",
    "reward/penalty": "mean that the lengths of these samples add to their rewards (experience.overlong soft)",
    "eval/accuracy": "avg@k on the held-out problems, with the weights after this step; with several sets the mean of "
    "their own, which have the set's name behind: eval/accuracy/NAME, and so for all of eval/",
    "eval/pass_at_k": "share of the held-out problems that one response of k at least solves",
    "eval/unjudged": "share of the evaluation's responses that the judge could not tell; they count nowhere else",
    "eval/mean_length": "response tokens of the evaluation, mean",
    "eval/truncated": "share of the evaluation's responses cut at rollout.global_max_length",
    "rollout/samples": "samples in flight: each got one segment in this step",
    "rollout/finished": "samples that ended by EOS in this step",
    "rollout/truncated": "samples cut at rollout.global_max_length in this step",
    "rollout/unfinished": "samples that go on in the next step",
    "rollout/truncated_share": "share of the samples completed in this step that were truncated",
    "rollout/length_mean": "response tokens of the samples completed in this step, mean",
    "rollout/length_max": "response tokens of the samples completed in this step, maximum",
    "rollout/tokens": "tokens decoded in this step",
    "rollout/tokens_per_s": "tokens decoded a second, verification included",
    "rollout/cached_share": "share of the input tokens that the servers had in their prefix cache",
    "rollout/reprefilled": "input tokens of resumed samples that the servers computed again",
    "rollout/recalled": "segments taken over from before a kill in the middle of this step, not decoded again",
    "rollout/aborts": "answers cut short by a server and asked again",
    "rollout/failed_requests": "samples whose request failed on every try; they go on in the next step",
    "rollout/verifier_failures": "samples the verifier gave up on; they leave as failed, not as wrong",
    "verifier/by_rule": "verdicts of this step that the rule gave",
    "verifier/by_model": "verdicts that the judging model gave",
    "verifier/by_cache": "verdicts that the judging model had given before on an equal answer",
    "verifier/by_no_answer": "responses that were wrong because no final answer was found in them",
    "verifier/right_by_model": "answers that the judging model called right, now or before; with verifier.kind hybrid "
    "the rule had denied them",
    "verifier/unknown": "samples among rollout/verifier_failures that the judging model could not tell",
    "servers/serving": "servers that get work: alive, and the current weights confirmed",
    "servers/missing": "servers that get none at the moment: being brought back, or given up",
    "servers/idle_share": "share of the time since the step before in which a server had no request, mean over all",
    "servers/restarts": "servers started again, or taken back, after a fault since the step before",
    "servers/failed_tries": "requests that a server did not answer soundly and that were made again",
    "servers/out_of_memory": "requests that found no room in a server's KV cache",
    "servers/imbalance": "tokens asked of the busiest server over the mean of all, in this step; 1 is even",
    "train/samples": "samples trained in this step",
    "train/multi_version_samples": "samples trained in this step that two or more weight versions made",
    "train/truncated_samples": "samples trained in this step that were truncated",
    "train/tokens": "response tokens trained in this step",
    "train/loss": "the objective of Eq. 7, before the update",
    "train/entropy": "mean entropy of the trained tokens, nats, at the sampling temperature",
    "train/masked_share": "share of the trained tokens that the mastered-token mask left out",
    "train/mastered_share": "share of the trained tokens with p >= dmmpt.tau in samples of reward 1: those that may be "
    "masked",
    "train/sigma": "dmmpt.sigma, to be seen beside train/entropy; with dmmpt.mode dynamic only",
    "train/clipped_share": "share of the trained tokens whose gradient the clip took away",
    "train/ratio_deviation": "mean |importance ratio - 1| over the trained tokens",
    "train/mismatch_mean": "mean |log-prob of trainer - log-prob of server| over last segments, nats",
    "train/mismatch_max": "maximum of that difference over last segments, nats",
    "train/staleness": "mean |log-prob now - log-prob when sampled| over all trained tokens, nats",
    "train/grad_norm": "global gradient norm before clipping",
    "train/lr": "learning rate of the update",
    "train/micro_batches": "micro-batches of the update on each data-parallel rank",
    "pools/unfinished": "samples decoded in part, after this step",
    "pools/waiting": "complete samples that wait for their group, after this step",
    "pools/trained": "samples trained since the run began",
    "pools/filtered": "samples left out since the run began: their groups had no contrast, or they were truncated "
    "(experience.overlong filter)",
    "pools/failed": "samples a server or the verifier gave up on, since the run began",
    "time/step": "seconds since the last step was logged",
    "time/rollout": "seconds in rollout, verification included",
    "time/journal": "seconds of it in which a thread beside it wrote segments to pools.sqlite",
    "time/verify": "seconds of it in which only verification was left to do",
    "time/train": "seconds in the policy update",
    "time/sync": "seconds in converting the weights and loading them into the servers",
    "time/evaluate": "seconds in the evaluation after the step before",
    "time/checkpoint": "seconds in the checkpoint after the step before",
}

_BY_AGE = {
    "token_share": "share of the trained tokens",
    "ratio_deviation": "mean |p now / p when sampled - 1|",
    "kl": "KL divergence of the policy now from the one that sampled, nats a token; what POIS leaves uncorrected",
    "outside_clip": "share with p now / p when sampled outside the clip range, which SAIS would clip",
    "reward": "mean reward of their samples, a token one count",
    "advantage": "mean advantage, a token one count",
}
METRICS |= {
    f"age-{age}/{name}": f"of trained tokens made {age} weight versions ago: {text}"
    for age in AGES
    for name, text in _BY_AGE.items()
}


def is_declared(name: str) -> bool:
    """Whether `name` is one of METRICS, or one of eval/ of a single set."""
    return name in METRICS or (name.startswith("eval/") and name.rpartition("/")[0] in METRICS)
