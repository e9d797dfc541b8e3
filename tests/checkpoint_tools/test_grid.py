"""Converted checkpoints in real Megatron-Core models over gloo, at every layout that four ranks allow."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint_tools.support import to_megatron
from tests.tiny_models import tiny_model

WORKER = Path(__file__).with_name("grid_worker.py")
ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "layouts"), [("moe", 22), ("tied", 6)])
def test_load_and_export_are_bit_equal_at_every_layout(tmp_path, kind, layouts):
    """Converted once, loaded at each layout; saved at each layout, exported (Megatron-Bridge#1716, #1871,
    #957)."""
    tiny_model(tmp_path / "hf", kind, num_hidden_layers=4, vocab_size=271)  # an odd vocabulary: TP 2 pads it
    to_megatron(tmp_path / "hf", tmp_path / "megatron")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", str(WORKER)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run([*command, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=800)
    assert result.returncode == 0, result.stderr[-4000:]
    passed = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    assert len(passed) == layouts
    assert max(sizes["pipeline"] * sizes["virtual_pipeline"] for sizes in passed) == 4
