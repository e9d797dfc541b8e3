"""A checkpoint goes on in any other layout and on any other number of ranks, as if nothing had happened."""

from functools import reduce
from operator import or_

import pytest
import torch
import torch.distributed as dist

from tests.parallel.layouts import make_models
from tests.parallel.resumes import OVERLAPS, RESUMES, save, take_up
from ulorl_megatron.config.schema import Dtype
from ulorl_megatron.launch.local import start_ranks

pytestmark = pytest.mark.slow  # two launches and some twenty layouts

@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """source of a save or name of a resume -> what each rank computed."""
    models, runs = tmp_path_factory.mktemp("models"), tmp_path_factory.mktemp("runs")
    make_models(models)
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    done = {}
    for resume in {r.source: r for r in RESUMES if r.writers == 1}.values():
        done[resume.source] = [save(models, runs, resume)]
    for world in (2, 4):
        output = tmp_path_factory.mktemp(f"ranks{world}-")
        command = ["-m", "tests.parallel.resume_worker", *map(str, (models, runs, output))]
        assert start_ranks(command, world, output) == 0
        ranks = [torch.load(output / f"{rank}.pt") for rank in range(world)]
        done |= {name: [rank[name] for rank in ranks] for name in ranks[0]}
    for resume in RESUMES:
        if resume.readers == 1:
            done[resume.name] = [take_up(models, runs, resume)]
    return done


def whole(ranks, what):
    return reduce(or_, (rank[what] for rank in ranks))


def assert_bit_equal(actual, expected):
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


@pytest.mark.parametrize("source", dict.fromkeys(r.source for r in RESUMES))
def test_a_first_step_at_rate_zero_leaves_the_weights_of_the_model(results, source):
    """In float32 and in bfloat16, where the float32 masters must be those of the weights that were loaded."""
    assert_bit_equal(whole(results[source], "unmoved"), whole(results[source], "fresh"))


@pytest.mark.parametrize("resume", RESUMES, ids=lambda r: r.name)
def test_the_weights_are_bit_equal_and_a_step_at_rate_zero_leaves_them(results, resume):
    """Masters and moments of each rank are of the weights it holds (SkyRL#2149, Megatron-LM#5071)."""
    saved = whole(results[resume.source], "weights")
    for what in ("weights", "unmoved"):
        assert_bit_equal(whole(results[resume.name], what), saved)


@pytest.mark.parametrize("resume", RESUMES, ids=lambda r: r.name)
def test_the_next_updates_are_the_same(results, resume):
    """The second of them depends on the moments and on the number of updates so far. Those compared with were made
    while the checkpoint was written.
    """
    tolerance = 1e-4 if resume.dtype is Dtype.float32 else 2e-2
    wanted = results[resume.source][0]["stats"]
    for rank in results[resume.name]:
        for actual, one in zip(rank["stats"], wanted, strict=True):
            assert actual["tokens"] == one["tokens"]
            assert actual["grad_norm"] == pytest.approx(one["grad_norm"], rel=tolerance)
            assert actual["sums"]["loss"] == pytest.approx(one["sums"]["loss"], rel=tolerance, abs=tolerance)
            assert actual["sums"]["entropy"] == pytest.approx(one["sums"]["entropy"], rel=tolerance)


def test_a_rank_that_cannot_write_stops_them_all(results):
    first, second = results["failing"]
    assert "checkpoint of step 2 could not be written" in first["message"]
    assert "rank 1" in first["message"] and "No space left" in first["message"]
    assert "checkpoint of step 2 could not be written" in second["message"]
    assert first["latest"] == second["latest"] == 1


@pytest.mark.parametrize("case", OVERLAPS, ids=lambda case: case.name)
def test_overlap_and_offload_change_no_bit(results, case):
    """Ranks without samples, several micro-batches and several updates in a row among it."""
    assert results[f"overlap-{case.name}"] == [True, True]
