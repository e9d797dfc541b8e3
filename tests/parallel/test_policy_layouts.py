"""Every layout, over gloo ranks and Megatron's real schedules, against one process."""

from functools import cache

import pytest
import torch
import torch.distributed as dist

from tests.parallel.layouts import CASES, MODELS, Case, compute, make_models
from tests.policy.support import assert_gradients_close
from ulorl_megatron.errors import UserError
from ulorl_megatron.launch.local import start_ranks

EVERY = [pytest.param(world, case, id=f"{world}-{case.name}") for world, cases in CASES.items() for case in cases]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    make_models(directory)
    return directory


@pytest.fixture(scope="module")
def expected(models, tmp_path_factory):
    """model name -> what one process computes."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    run_dir = tmp_path_factory.mktemp("alone")
    return {name: compute(models, run_dir, Case(name, {})) for name in MODELS}


@pytest.fixture(scope="module")
def launches(models, tmp_path_factory):
    """launches(world) -> what each rank computed, from one launch for all cases of that size, failed or not."""

    @cache
    def results(world):
        output = tmp_path_factory.mktemp(f"ranks{world}-")
        command = ["-m", "tests.parallel.policy_worker", str(models), str(output)]
        try:
            code = start_ranks(command, world, output)
        except UserError as error:
            return str(error)
        cases = [case.name for case in CASES[world]]
        return code or [{name: torch.load(output / f"{name}-{rank}.pt") for name in cases} for rank in range(world)]

    return results


@pytest.fixture
def launched(request, launches):
    results = launches(request.param)
    assert isinstance(results, list), f"the ranks failed: {results}"
    return results


def whole(results, case, what):
    """The tensors of all ranks together; each must come from exactly one (slime#2280: and whole)."""
    parts = [rank[case.name][what] for rank in results]
    names = [name for part in parts for name in part]
    assert len(names) == len(set(names))
    return {name: tensor for part in parts for name, tensor in part.items()}


@pytest.mark.parametrize("launched, case", EVERY, indirect=["launched"])
def test_scores(launched, expected, case):
    for rank in launched:
        for actual, wanted in zip(rank[case.name]["scores"], expected[case.model]["scores"], strict=True):
            torch.testing.assert_close(actual, wanted, atol=1e-5, rtol=0)


@pytest.mark.parametrize("launched, case", EVERY, indirect=["launched"])
def test_loss_and_statistics(launched, expected, case):
    """On every rank, pipeline stages without a head included; masked tokens counted across context ranks."""
    wanted = expected[case.model]["stats"]
    assert 0 < wanted[0]["sums"]["masked_tokens"] < wanted[0]["tokens"]
    for rank in launched:
        for actual, one in zip(rank[case.name]["stats"], wanted, strict=True):
            assert actual["tokens"] == one["tokens"] and actual["lr"] == one["lr"]
            assert actual["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)
            assert actual["sums"] == pytest.approx(one["sums"], rel=1e-4, abs=1e-4)
            assert actual["maxima"] == pytest.approx(one["maxima"], rel=1e-4)


@pytest.mark.parametrize("launched, case", EVERY, indirect=["launched"])
def test_gradients(launched, expected, case):
    """verl#5993, #6609, prime-rl#2562: the same for any layout, with unequal masks per context-parallel shard."""
    assert_gradients_close(whole(launched, case, "gradients"), expected[case.model]["gradients"], tolerance=1e-4)


@pytest.mark.parametrize("launched, case", EVERY, indirect=["launched"])
def test_weights_after_three_updates(launched, expected, case):
    actual, wanted = whole(launched, case, "weights"), expected[case.model]["weights"]
    assert actual.keys() == wanted.keys()
    for name, weight in wanted.items():
        torch.testing.assert_close(actual[name], weight, atol=2e-6, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
