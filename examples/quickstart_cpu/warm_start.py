"""A short supervised warm start with the Megatron policy: cross-entropy on worked answers, then HF weights.

    python examples/quickstart_cpu/warm_start.py CONFIG --model DIR --data FILE.jsonl --out DIR [--steps N ...]

Starts run.processes ranks by itself, like `ulorl train`.
"""

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import List

import torch
from transformers import AutoTokenizer

from ulorl_megatron.algorithm.batch import TrainSample
from ulorl_megatron.algorithm.objective import cross_entropy_objective
from ulorl_megatron.cli import log_to_file
from ulorl_megatron.config import Config, load
from ulorl_megatron.errors import UserError
from ulorl_megatron.launch import FOLLOWER_EXIT, FirstRankFailed, Ranks, is_rank, start_ranks


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", help="the run's configuration; its policy and model.dtype count")
    parser.add_argument("--model", required=True, help="HF folder to start from")
    parser.add_argument("--data", required=True, help='JSONL, one {"prompt", "response"} a line')
    parser.add_argument("--out", required=True, help="HF folder to write")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=128, help="samples a step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def read_samples(file: str, model: str) -> List[TrainSample]:
    """Prompt through the chat template as `ulorl train` does it, response, EOS."""
    from ulorl_megatron.data.prompts import encode_prompt

    tokenizer = AutoTokenizer.from_pretrained(model)
    samples = []
    for i, line in enumerate(Path(file).read_text().splitlines()):
        row = json.loads(line)
        prompt = encode_prompt(tokenizer, row["prompt"])
        response = tokenizer.encode(row["response"], add_special_tokens=False) + [tokenizer.eos_token_id]
        samples.append(
            TrainSample(
                sample_id=i,
                tokens=torch.tensor(prompt + response),
                prompt_length=len(prompt),
                reward=1.0,
                advantage=1.0,
                behaviour_log_probs=torch.zeros(len(response)),
                ages=torch.zeros(len(response), dtype=torch.int64),
            )
        )
    return samples


def warm_start(args: argparse.Namespace, config: Config, ranks: Ranks) -> None:
    from ulorl_megatron.policy import Policy
    from ulorl_megatron.weight_sync import publish_weights

    policy = Policy(config)
    samples = read_samples(args.data, args.model)
    order = random.Random(args.seed)
    for step in range(1, args.steps + 1):
        stats = policy.update(order.sample(samples, args.batch), cross_entropy_objective)
        if ranks.first and (step % 20 == 0 or step == args.steps):
            loss = stats.sums["loss"] / stats.tokens
            print(f"warm start {step}/{args.steps}  cross-entropy {loss:.3f} nats a token", flush=True)
    out = Path(args.out)
    folder = publish_weights(policy, ranks, config.model, out.parent / f".{out.name}", 0, keep=1)
    ranks.only_first(lambda: (folder.rename(out), folder.parent.rmdir()))


def main() -> int:
    args = arguments()
    overrides = [f"model.path={args.model}", f"policy.optimizer.lr={args.lr}", "policy.optimizer.warmup_steps=10"]
    config = load(args.config, overrides)
    if Path(args.out).exists():
        raise UserError(f"--out: {args.out} exists already; remove it, or name another folder")
    if not is_rank():
        with tempfile.TemporaryDirectory() as logs:
            return start_ranks(sys.argv, config.run.processes, Path(logs))
    log_to_file(Path(os.devnull))
    try:
        with Ranks() as ranks:
            warm_start(args, config, ranks)
    except FirstRankFailed:
        return FOLLOWER_EXIT
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"error: {error}")
