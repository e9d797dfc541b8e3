"""`ulorl train` as people run it, on the quickstart's task made small."""

import json
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart_cpu"


def run_python(*arguments):
    subprocess.run([sys.executable, *map(str, arguments)], check=True)


def command(task, run, *overrides):
    settings = {
        "run.dir": run,
        "model.path": task / "warm",
        "data.train": task / "train.jsonl",
        "data.eval": task / "heldout.jsonl",
        "run.total_steps": 5,
        "rollout.prompts_per_step": 16,
        "evaluation.every": 0,
    }
    return [
        *(sys.executable, "-m", "ulorl_megatron.cli", "train", str(EXAMPLE / "config.yaml")),
        *(f"{key}={value}" for key, value in settings.items()),
        *overrides,
    ]


def train(task, run, *overrides):
    done = subprocess.run(command(task, run, *overrides), capture_output=True, text=True, timeout=600)
    return done.returncode, done.stdout, done.stderr


def records(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
