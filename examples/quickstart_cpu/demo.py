"""What `make demo` runs: make the task, warm the model up, train it by UloRL. Each part is skipped where it is done.

    python examples/quickstart_cpu/demo.py [--dir runs/quickstart] [--seed 0] [key=value ...]
"""

import argparse
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default="runs/quickstart", help="everything is written below it")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", metavar="key=value", nargs="*", help="further settings of the run")
    args = parser.parse_args()
    task, run = Path(args.dir) / "task", Path(args.dir) / "run"
    config = HERE / "config.yaml"

    if not (task / "model").exists():
        step("1/3  the task: a tiny untrained Qwen3-MoE, its tokenizer, sums to solve")
        python(HERE / "make_task.py", task, "--seed", args.seed)
    if not (task / "warm").exists():
        step("2/3  warm start: a little supervised training, so that some answers are right")
        python(
            *(HERE / "warm_start.py", config, "--seed", args.seed),
            *("--model", task / "model", "--data", task / "warmstart.jsonl", "--out", task / "warm"),
        )
    step("3/3  UloRL: Megatron-Core trains, SGLang decodes in segments")
    settings = {
        "run.dir": run,
        "run.seed": args.seed,
        "model.path": task / "warm",
        "data.train": task / "train.jsonl",
        "data.eval": task / "heldout.jsonl",
    }
    python(
        *("-m", "ulorl_megatron.cli", "train", config),
        *(f"{key}={value}" for key, value in settings.items()),
        *args.overrides,
    )
    return 0


def step(title: str) -> None:
    print(f"\n== {title}", flush=True)


def python(*arguments) -> None:
    """Runs this Python; ends with its exit code if it fails."""
    code = subprocess.call([sys.executable, *map(str, arguments)])
    if code:
        sys.exit(code)


if __name__ == "__main__":
    sys.exit(main())
