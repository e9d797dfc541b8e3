"""How long a training step stands still for a checkpoint: written at once, or while training goes on.

    python benchmarks/checkpoint_save.py --dir /scratch/bench [--hidden 512] [--layers 6] [--repeat 3]

Two ranks on this machine train a random dense model with data parallelism (the default: 25 million parameters; weights,
masters and moments in float32, 16 bytes each) and save after an update, by turns with checkpoint.asynchronous false and
true. Printed: seconds that the save keeps both ranks, seconds of an update with and without a save being written beside
it, seconds until the checkpoint is complete, and the peak memory of rank 0.
"""

import argparse
import json
import os
import resource
import shutil
import statistics
import sys
import time
from pathlib import Path

HEADS = 8


def make_model(directory: Path, hidden: int, layers: int) -> int:
    """Random weights; returns the number of parameters."""
    import torch

    from checkpoint_tools.architecture import Architecture
    from checkpoint_tools.hf_files import ShardWriter
    from checkpoint_tools.name_map import weights

    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
        "head_dim": hidden // HEADS,
        "num_hidden_layers": layers,
        "vocab_size": 2048,
        "max_position_embeddings": 2048,
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    shapes = [
        (name, shape)
        for weight in weights(Architecture.from_hf(config))
        for name, shape in zip(weight.hf, weight.hf_shapes, strict=True)
    ]
    with ShardWriter(directory / "model.safetensors", [(n, torch.float32, s) for n, s in shapes]) as writer:
        for name, shape in shapes:
            writer.put(name, torch.randn(shape) * 0.02 if len(shape) > 1 else torch.ones(shape))
    return sum(torch.Size(shape).numel() for _, shape in shapes)


def rank_main(args: argparse.Namespace) -> None:
    """One rank: measures, and rank 0 prints."""
    import torch
    import torch.distributed as dist

    from ulorl_megatron.algorithm.batch import TrainSample
    from ulorl_megatron.algorithm.objective import cross_entropy_objective
    from ulorl_megatron.config.schema import Config, Dtype
    from ulorl_megatron.launch import Ranks
    from ulorl_megatron.policy import Policy

    torch.set_num_threads(1)
    samples = [
        TrainSample(
            sample_id=i,
            tokens=torch.randint(0, 2048, (256,)),
            prompt_length=32,
            reward=1.0,
            advantage=1.0,
            behaviour_log_probs=torch.zeros(224),
            ages=torch.zeros(224, dtype=torch.int64),
        )
        for i in range(args.samples)
    ]

    def timed(work, *arguments) -> float:
        dist.barrier()
        began = time.perf_counter()
        work(*arguments)
        dist.barrier()
        return time.perf_counter() - began

    with Ranks() as ranks:
        policies = {}
        for asynchronous in (False, True):
            config = Config()
            config.run.dir = str(args.dir / f"run-{asynchronous}")
            config.model.path, config.model.dtype = str(args.dir / "model"), Dtype.float32
            config.checkpoint.asynchronous, config.checkpoint.keep_last = asynchronous, 1
            policies[asynchronous] = Policy(config)
        update = timed(policies[True].update, samples, cross_entropy_objective)  # warm
        rows = {False: [], True: []}
        for turn in range(args.repeat):
            for asynchronous, policy in policies.items():
                plain = timed(policy.update, samples, cross_entropy_objective)
                blocked = timed(policy.save, turn)
                began = time.perf_counter()
                beside = timed(policy.update, samples, cross_entropy_objective)
                policy.settle_checkpoint(wait=True)
                complete = blocked + time.perf_counter() - began if asynchronous else blocked
                rows[asynchronous].append((plain, blocked, beside, complete))
        if ranks.first:
            size = sum(f.stat().st_size for f in (args.dir / "run-True" / "checkpoints").rglob("*") if f.is_file())
            print(f"{size / 1e6:.0f} MB a checkpoint, {ranks.world_size} ranks, warm update {update:.2f} s")
            medians = {}
            for asynchronous, measured in rows.items():
                medians[asynchronous] = [statistics.median(column) for column in zip(*measured, strict=True)]
                plain, blocked, beside, complete = medians[asynchronous]
                print(
                    f"{'asynchronous' if asynchronous else 'synchronous':<13}the save keeps the step {blocked:6.2f} s, "
                    f"the next update takes {beside:6.2f} s ({plain:.2f} without), complete after {complete:6.2f} s"
                )
            (_, at_once, _, _), (plain, started, beside, _) = medians[False], medians[True]
            lost = started + beside - plain
            print(
                f"the step stands still for {started / at_once:.2f} of the time; with the slower update beside it, "
                f"{lost / at_once:.2f}"
            )
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
            print(f"peak memory of rank 0: {peak:.2f} GB, both policies together")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="an empty or absent directory on the disk to measure")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--samples", type=int, default=16, help="of 256 tokens, in an update")
    parser.add_argument("--repeat", type=int, default=3)
    args = parser.parse_args()

    from ulorl_megatron.launch import is_rank, start_ranks

    if is_rank():
        rank_main(args)
        return
    if args.dir.exists() and any(args.dir.iterdir()):
        sys.exit(f"{args.dir} is not empty")
    count = make_model(args.dir / "model", args.hidden, args.layers)
    print(f"{count / 1e6:.1f} million parameters", flush=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    code = start_ranks([__file__, *sys.argv[1:]], 2, args.dir)
    shutil.rmtree(args.dir)
    sys.exit(code)


if __name__ == "__main__":
    main()
