"""`ulorl plan --slurm`: the split with the least time a sample, and the line that starts it."""

import re
import shlex
from types import SimpleNamespace

import pytest

from tests.plan.test_plan_command import LONG, plan
from ulorl_megatron.cli import main
from ulorl_megatron.config import load
from ulorl_megatron.plan.slurm import Trainers, least


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "my config.yaml"
    file.write_text(LONG)
    return str(file)


@pytest.mark.parametrize("bottom", [1, 2, 9, 30, 31])
def test_the_valley_is_found_without_looking_everywhere(bottom):
    choices = [Trainers(nodes, 0, 0.0) for nodes in range(1, 32)]
    found = least(choices, lambda choice: SimpleNamespace(sample_s=1 + abs(choice.nodes - bottom) ** 1.5))
    assert min(found, key=lambda choice: found[choice].sample_s).nodes == bottom
    assert len(found) <= 14


def test_the_split_and_its_command(config, capsys):
    code, out = plan(capsys, config, "rollout.prompts_per_step=8", "--slurm", "5")
    assert code == 0
    rows = [line.split() for line in out.splitlines() if re.match(r"\s+\d\s+\d\s", line)]
    assert [row[:2] for row in rows] == [["2", "3"], ["3", "2"], ["4", "1"]], "one node of trainers is too small"
    best = min(rows, key=lambda row: float(row[6]))
    assert f"least time a sample: {best[0]} nodes train, {best[1]} serve" in out
    (line,) = [line for line in out.splitlines() if line.startswith("  sbatch")]
    words = shlex.split(line)
    options = [f"--nodes={best[0]}", ":", f"--nodes={best[1]}", "slurm/train_het.sbatch"]
    assert words[1:5] == options
    assert load(words[5], words[6:]).servers.extra_args == ["--tp-size", "8"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--slurm", "1"], "splits 2 or more nodes"),
        (["--slurm", "4", "--gpu", "cpu"], "splits 2 or more nodes"),
        (["--slurm", "2"], "fits no number of trainer nodes below 2: the longest sample needs more memory"),
        (["--slurm", "3", "policy.parallel.context=32"], "does not divide 16 ranks"),
    ],
)
def test_what_cannot_be_split(config, capsys, arguments, words):
    assert main(["plan", config, *arguments]) == 2
    captured = capsys.readouterr()
    assert words in captured.err and captured.out == ""
