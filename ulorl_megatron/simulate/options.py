"""The options of `ulorl plan --rollout`, and the numbers they start from."""

import argparse
from pathlib import Path
from typing import Dict, NamedTuple


class _Number(NamedTuple):
    default: float
    meaning: str


MEDIAN, SIGMA, PROMPT_TOKENS = 7658.0, 1.016, 200

# With MEDIAN and SIGMA fitted to the paper's Table 1 (128k tokens in 1, 2 and 4 segments; tests/simulate). The paper
# says neither what its servers were nor how long its responses: one set of numbers that gives its times, no more.
NUMBERS: Dict[str, _Number] = {
    "step_s": _Number(0.005601, "a decoding step without requests"),
    "sequence_s": _Number(2.969e-5, "more for every running request"),
    "context_s": _Number(7.629e-9, "more for every token of their contexts"),
    "prefill_tokens_per_s": _Number(80_000.0, "input tokens a second"),
    "kv_tokens": _Number(4_000_000, "tokens that a server's KV cache holds"),
    "update_s": _Number(10.0, "loading weights"),
    "train_tokens_per_s": _Number(103_100.0, "tokens a second of the policy update"),
    "fixed_s": _Number(10.11, "of a step beside rollout, update and loading"),
}


def add_arguments(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--rollout", action="store_true", help="plan segments, not the trainer's layout")
    group.add_argument("--servers", type=int, default=8, metavar="N", help="rollout servers (default: %(default)s)")
    group.add_argument("--segments", default="1,2,4,8", metavar="N,...", help="segment counts to compare")
    group.add_argument("--lengths", type=Path, metavar="FILE", help="observed response lengths, one a line")
    group.add_argument("--median", type=float, default=MEDIAN, metavar="TOKENS", help="of a log-normal law of lengths")
    group.add_argument("--sigma", type=float, default=SIGMA, metavar="X", help="standard deviation of its logarithm")
    group.add_argument("--steps", type=int, default=10, metavar="N", help="steps to average (default: %(default)s)")
    group.add_argument("--max-age", type=float, default=float("inf"), metavar="X", help="mean age tokens may have")
    for name, (default, meaning) in NUMBERS.items():
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, type=float, default=default, metavar="X", help=f"{meaning} (default: {default:g})")
