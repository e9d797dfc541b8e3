"""TensorBoard's "Custom Scalars": charts under the questions that people have of a run."""

import re
from typing import Dict, List

from ulorl_megatron.algorithm.staleness import AGES

# Question -> chart -> metrics.
CHARTS: Dict[str, Dict[str, List[str]]] = {
    "Is it learning?": {
        "reward": ["reward/complete", "reward/issued"],
        "held-out accuracy": ["eval/accuracy", "eval/pass_at_k"],
        "response tokens": ["rollout/length_mean", "rollout/length_max", "eval/mean_length"],
        "samples trained": ["train/samples", "train/multi_version_samples", "train/truncated_samples"],
        "gradient norm": ["train/grad_norm"],
    },
    "Is entropy held?": {
        "entropy and sigma": ["train/entropy", "train/sigma"],
        "mastered and masked tokens": ["train/mastered_share", "train/masked_share"],
    },
    "Is POIS safe?": {
        "KL by age": [f"age-{age}/kl" for age in AGES],
        "|ratio - 1| by age": [f"age-{age}/ratio_deviation" for age in AGES],
        "outside the clip range by age": [f"age-{age}/outside_clip" for age in AGES],
        "trained tokens by age": [f"age-{age}/token_share" for age in AGES],
        "trainer against server": ["train/mismatch_mean", "train/mismatch_max"],
    },
    "Where does the time go?": {
        "seconds of a step": [f"time/{part}" for part in ("rollout", "train", "sync", "checkpoint", "evaluate")],
        "tokens a second": ["rollout/tokens_per_s"],
        "idle servers": ["servers/idle_share"],
        "computed again": ["rollout/reprefilled"],
        "evenness of servers": ["servers/imbalance"],
    },
    "Are the rewards honest?": {
        "verdicts": ["verifier/by_rule", "verifier/by_model", "verifier/by_cache", "verifier/by_no_answer"],
        "not judged": ["verifier/unknown", "rollout/verifier_failures", "eval/unjudged"],
        "truncated": ["rollout/truncated_share", "eval/truncated"],
    },
    "Is anything lost?": {
        "samples in the pools": ["pools/unfinished", "pools/waiting"],
        "samples that left": ["pools/trained", "pools/filtered", "pools/failed"],
        "servers": ["servers/serving", "servers/missing", "servers/restarts"],
        "requests made again": ["servers/failed_tries", "servers/out_of_memory", "rollout/aborts"],
    },
}


def layout() -> Dict[str, Dict[str, list]]:
    """CHARTS for SummaryWriter.add_custom_scalars, where tags are regular expressions, matched from the left."""
    return {
        question: {title: ["Multiline", [_pattern(name) for name in names]] for title, names in charts.items()}
        for question, charts in CHARTS.items()
    }


def _pattern(name: str) -> str:
    """Of evaluations also those of single sets, which have their name behind."""
    return re.escape(name) + ("(/.*)?$" if name.startswith("eval/") else "$")
