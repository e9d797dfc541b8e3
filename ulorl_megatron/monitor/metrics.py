"""The names of everything that is measured, each with its meaning. TensorBoard tags and metrics.jsonl use them."""

from typing import Dict

METRICS: Dict[str, str] = {
    "reward/mean": "mean reward of the samples completed in this step; truncated ones count 0",
    "reward/accuracy": "share of right answers among the samples of this step that ended by EOS",
    "reward/trained": "mean reward of the samples trained in this step (groups without contrast are left out)",
    "eval/accuracy": "avg@k on the held-out problems, with the weights after this step",
    "eval/length_mean": "response tokens of the evaluation, mean",
    "eval/truncated": "share of evaluation responses cut at rollout.global_max_length",
    "rollout/samples": "samples in flight: each got one segment in this step",
    "rollout/completed": "samples that ended by EOS or were truncated in this step",
    "rollout/truncated": "samples cut at rollout.global_max_length in this step",
    "rollout/truncated_share": "share of the completed samples that were truncated",
    "rollout/length_mean": "response tokens of the samples completed in this step, mean",
    "rollout/length_max": "response tokens of the samples completed in this step, maximum",
    "rollout/tokens": "tokens decoded in this step",
    "rollout/tokens_per_s": "tokens decoded a second of rollout/decode time",
    "rollout/cached_share": "share of the input tokens the servers had in their prefix cache",
    "rollout/aborts": "answers cut short by a server and asked again",
    "rollout/failed_requests": "samples whose request failed on every try; they go on in the next step",
    "rollout/verifier_failures": "samples the verifier gave up on; they leave as failed",
    "train/loss": "the objective of Eq. 7, before the update",
    "train/entropy": "mean entropy of the policy over the trained tokens, nats, at the sampling temperature",
    "train/masked_share": "share of the trained tokens that the mastered-token mask left out",
    "train/masked_share_positive": "the same, of the tokens of right answers",
    "train/clipped_share": "share of the trained tokens whose gradient the clip took away",
    "train/ratio_deviation": "mean |importance ratio - 1| over the trained tokens",
    "train/ratio_deviation_max": "maximum of |importance ratio - 1|",
    "train/mismatch": "mean |log-prob of trainer - log-prob of server| over last segments, nats",
    "train/mismatch_max": "maximum of that difference over last segments, nats",
    "train/staleness": "mean |log-prob now - log-prob when sampled| over all trained tokens, nats",
    "train/grad_norm": "global gradient norm before clipping",
    "train/lr": "learning rate of the update",
    "train/micro_batches": "micro-batches of the update on each data-parallel rank",
    "train/samples": "samples trained in this step",
    "train/tokens": "response tokens trained in this step",
    "train/mixed_version_samples": "samples trained in this step with segments of two or more weight versions",
    "pools/unfinished": "samples decoded in part, after this step",
    "pools/waiting": "complete samples that wait for their group, after this step",
    "pools/trained": "samples trained since the run began",
    "pools/filtered": "samples of groups without contrast, since the run began",
    "pools/failed": "samples a server or the verifier gave up on, since the run began",
    "time/step": "seconds from the end of the last step to the end of this one",
    "time/rollout": "seconds in rollout, verification included",
    "time/verify": "seconds of it in which only verification was left to do",
    "time/train": "seconds in the policy update",
    "time/sync": "seconds in converting the weights and loading them into the servers",
    "time/evaluate": "seconds in the evaluation since the line before",
    "time/checkpoint": "seconds in writing the checkpoint since the line before",
}


def checked(values: Dict[str, float]) -> Dict[str, float]:
    """`values` as floats. Raises KeyError for a name that METRICS does not declare."""
    undeclared = sorted(set(values) - set(METRICS))
    if undeclared:
        raise KeyError(f"metrics not declared in ulorl_megatron/monitor/metrics.py: {', '.join(undeclared)}")
    return {name: float(value) for name, value in values.items()}
