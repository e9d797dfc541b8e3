"""docs/data.md and the pipelines of examples/: commands that need no server run as they stand, the others are read."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ulorl_megatron.cli import main
from ulorl_megatron.config import load
from ulorl_megatron.data import difficulty, pipeline
from ulorl_megatron.data.files import read_rows
from ulorl_megatron.data.pipeline import load_pipeline
from ulorl_megatron.data.steps import STEPS
from ulorl_megatron.evaluation import command
from ulorl_megatron.evaluation.checkpoints import find_checkpoints

ROOT = Path(__file__).parents[2]
COMMANDS = [
    shlex.split(line)[1:]
    for line in (ROOT / "docs" / "data.md").read_text().splitlines()
    if line.startswith("    ulorl ")
]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A folder like the clone's after the demo: examples/, and the quickstart's task with its model as the warm one."""
    folder = tmp_path_factory.mktemp("clone")
    (folder / "examples").symlink_to(ROOT / "examples")
    task = folder / "runs" / "quickstart" / "task"
    task.parent.mkdir(parents=True)
    subprocess.run([sys.executable, ROOT / "examples" / "quickstart_cpu" / "make_task.py", task], check=True)
    for copy in (task / "warm", task.parent / "run"):
        shutil.copytree(task / "model", copy)
    return folder


def test_every_command_of_the_page(clone, monkeypatch):
    monkeypatch.chdir(clone)
    evaluated = []
    monkeypatch.setattr(command, "run", lambda arguments: evaluated.append(arguments) or 0)
    monkeypatch.setattr(difficulty.Difficulty, "run", lambda self, rows, work: ((row, row) for row in rows))
    for arguments in COMMANDS:
        assert main(arguments) == 0, arguments
    (arguments,) = evaluated
    config = load(arguments.config, arguments.overrides)
    assert [c.label for c in find_checkpoints(arguments.checkpoint, config.model.path)] == ["warm", "run"]
    cleaned = [row for _, row in read_rows(clone / "runs" / "quickstart" / "data" / "data.jsonl")]
    assert 3000 < len(cleaned) < 4096 and len({row["prompt"] for row in cleaned}) == len(cleaned)
    assert len(list(read_rows(clone / "runs" / "quickstart" / "heldout.parquet"))) == 256


def test_every_step_and_setting_is_on_the_page():
    page = (ROOT / "docs" / "data.md").read_text()
    for name, kind in STEPS.items():
        (row,) = re.findall(rf"^\| `{name}` \|(.*)$", page, re.MULTILINE)
        assert set(re.findall(r"`(\w+)`", row.rpartition("|")[0].rpartition("|")[2])) == set(kind.__dataclass_fields__)


def test_the_pipeline_for_real_data_is_sound(monkeypatch):
    """All but its files, which are not here."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(pipeline.Path, "exists", lambda path: True)
    monkeypatch.setattr(pipeline.Path, "is_dir", lambda path: True)
    found = load_pipeline("examples/data/math.yaml")
    assert {name for name, _ in found.steps} == set(STEPS)
