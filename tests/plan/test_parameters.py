"""Planned bytes against what Megatron builds, on every rank of a layout."""

import json
import os
import subprocess
import sys

import pytest

from checkpoint_tools.architecture import Architecture
from checkpoint_tools.name_map import weights
from tests.plan.fake_ranks import CASES, TRAINED
from tests.plan.support import make_models, planned, step_config
from ulorl_megatron.config.schema import Dtype, ParallelConfig, Recompute
from ulorl_megatron.plan.parameters import parameter_count
from ulorl_megatron.plan.published import PUBLISHED


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def built(models, tmp_path_factory):
    """What tests/plan/fake_ranks.py found, in a process of its own: this one has real groups."""
    output = tmp_path_factory.mktemp("built") / "ranks.json"
    command = [sys.executable, "-W", "ignore", "-m", "tests.plan.fake_ranks", str(models), str(output)]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(output.read_text())


def stage_of(rank: int, case) -> int:
    return rank // (case.world // case.sizes.pipeline)  # pipeline stages are the outermost dimension


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{c.name}-{i}" for i, c in enumerate(CASES)])
def test_parameters_are_exact_on_every_rank(built, number):
    case = CASES[number]
    for rank, held in enumerate(built["held"][number]):
        count = parameter_count(case.architecture(), case.sizes, stage_of(rank, case))
        assert held == {"dense": count.dense, "experts": count.experts}, f"rank {rank}"


@pytest.mark.parametrize("number", range(2 * len(TRAINED)))
def test_buffers_and_optimizer_of_every_rank(built, models, tmp_path, number):
    """Megatron pads its buffers, so that ranks get equal shares: to 64 elements a weight, and some a bucket."""
    case, found = TRAINED[number // len(Dtype)], built["trained"][number]
    config = step_config(models / case.name, tmp_path, 64, Dtype(found["dtype"]), Recompute.none, case.sizes)
    for rank, real in enumerate(found["ranks"]):
        plan = planned(config, case.world, stage_of(rank, case))
        assert plan.parameters == real["parameters"]
        assert plan.gradients <= real["gradients"] <= 1.02 * plan.gradients
        assert plan.optimizer == pytest.approx(sum(r["optimizer"] for r in same_stage(found, case, rank)), rel=0.02)


def same_stage(found, case, rank):
    """All ranks of the stage, scaled to one: which share of its state a rank has depends on the padding."""
    ranks = [r for i, r in enumerate(found["ranks"]) if stage_of(i, case) == stage_of(rank, case)]
    return [{"optimizer": r["optimizer"] / len(ranks)} for r in ranks]


@pytest.mark.parametrize("name", PUBLISHED)
def test_one_rank_holds_the_whole_model(name):
    arch = Architecture.from_hf(PUBLISHED[name])
    assert parameter_count(arch, ParallelConfig(), 0).total == sum(w.numel for w in weights(arch))


@pytest.mark.parametrize("name, billions", [("qwen3-4b", 4.02), ("qwen3-8b", 8.19), ("qwen3-30b-a3b", 30.53)])
def test_published_shapes_have_as_many_parameters_as_their_names_say(name, billions):
    count = parameter_count(Architecture.from_hf(PUBLISHED[name]), ParallelConfig(), 0)
    assert count.total / 1e9 == pytest.approx(billions, abs=0.01)
