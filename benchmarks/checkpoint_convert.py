"""Time and peak memory of both conversions, against `cp -r` of the same bytes, disk and run.

    python benchmarks/checkpoint_convert.py --dir /scratch/bench [--layers 2] [--repeat 3] [--workers 2]

Makes a slice of Qwen3-30B-A3B with its true widths (2 layers: 3.7 GB in bfloat16; needs 4 times that of
disk) and prints one line a measurement and the ratios of the medians. `cp` alone leaves its bytes in the page
cache, while a conversion is durable when it returns; `cp -r and sync` is the copy that is too.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from multiprocessing import Process
from pathlib import Path

QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def make_slice(directory: Path, layers: int) -> None:
    """Random weights in one safetensors file a layer. For a process of its own: a child's peak memory counts
    from what its parent has."""
    import torch

    from checkpoint_tools.architecture import Architecture
    from checkpoint_tools.hf_files import ShardWriter, write_index
    from checkpoint_tools.name_map import weights

    config = {**QWEN3_30B_A3B, "num_hidden_layers": layers}
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    by_file: dict[str, list] = {}
    for weight in weights(Architecture.from_hf(config)):
        file = f"model-{weight.layer if weight.layer is not None else 'rest'}.safetensors"
        by_file.setdefault(file, []).extend(zip(weight.hf, weight.hf_shapes, strict=True))
    noise = torch.randn(2**20).bfloat16()
    weight_map, total = {}, 0
    for file, tensors in by_file.items():
        with ShardWriter(directory / file, [(name, torch.bfloat16, shape) for name, shape in tensors]) as writer:
            for name, shape in tensors:
                count = torch.Size(shape).numel()
                tensor = noise.repeat(-(-count // len(noise)))[:count].view(shape).roll(len(weight_map))
                writer.put(name, tensor)
                weight_map[name] = file
                total += tensor.nbytes
    write_index(directory, weight_map, total)


def measured(command: list[str]) -> tuple[float, float, float]:
    """(seconds, CPU seconds, peak resident GB) of a command."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"failed with {process.returncode}: {' '.join(command)}")
    return seconds, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, required=True, help="an empty or absent directory on the disk to measure")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    if args.dir.exists() and any(args.dir.iterdir()):
        sys.exit(f"{args.dir} is not empty")
    hf, megatron, back, copy = (args.dir / name for name in ("hf", "megatron", "back", "copy"))
    maker = Process(target=make_slice, args=(hf, args.layers))
    maker.start()
    maker.join()
    if maker.exitcode:
        sys.exit("the slice could not be made")
    nbytes = sum(file.stat().st_size for file in hf.iterdir())
    print(f"{nbytes / 1e9:.2f} GB, {args.layers} layers, {args.workers} workers")
    tool = [sys.executable, "-m", "checkpoint_tools.cli"]
    workers = ["--workers", str(args.workers)]
    jobs = {
        "cp -r": (copy, ["cp", "-r", str(hf), str(copy)]),
        "cp -r and sync": (copy, ["sh", "-c", f"cp -r {hf} {copy} && sync -f {copy}"]),
        "hf-to-megatron": (megatron, [*tool, "hf-to-megatron", str(hf), str(megatron), *workers]),
        "megatron-to-hf": (back, [*tool, "megatron-to-hf", str(megatron), str(back), *workers]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(args.repeat):
        for name, (out, command) in jobs.items():
            shutil.rmtree(out, ignore_errors=True)
            subprocess.run(["sync"], check=True)
            took, cpu, peak = measured(command)
            seconds[name].append(took)
            print(
                f"{name:<16}{took:7.2f} s  {nbytes / took / 1e9:5.2f} GB/s  CPU {cpu:5.1f} s  peak {peak:.2f} GB",
                flush=True,
            )
    equal = subprocess.run([*tool, "verify", str(hf), str(back)], check=False).returncode == 0
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name in ("hf-to-megatron", "megatron-to-hf"):
        plain, durable = (medians[name] / medians[copy] for copy in ("cp -r", "cp -r and sync"))
        print(f"{name}: {plain:.2f} x cp -r, {durable:.2f} x cp -r and sync")
    shutil.rmtree(args.dir)
    if not equal:
        sys.exit("the round trip is not bit-equal")


if __name__ == "__main__":
    main()
