"""Planned activations against the peaks of real updates on a CPU: within 15 %."""

import json

import pytest

from tests.plan.support import MODELS, allocated, in_use, make_models, planned, run_update, step_config
from tests.plan.two_ranks import CASES, DTYPE, TOKENS
from ulorl_megatron.config.schema import Dtype, ParallelConfig, Recompute
from ulorl_megatron.errors import UserError
from ulorl_megatron.launch.local import start_ranks


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("recompute", Recompute)
@pytest.mark.parametrize("dtype, tokens", [(Dtype.float32, 1536), (Dtype.bfloat16, 384)])
@pytest.mark.parametrize("model", MODELS)
def test_one_rank(models, tmp_path, model, dtype, tokens, recompute):
    config = step_config(models / model, tmp_path, tokens, dtype, recompute, ParallelConfig())
    assert in_use(planned(config, world=1)) == pytest.approx(run_update(config, 1, allocated), rel=0.15)


@pytest.fixture(scope="module")
def peaks(models, tmp_path_factory):
    """(case, stage of the rank, peak) of both ranks, from one launch."""
    output = tmp_path_factory.mktemp("two")
    try:
        code = start_ranks(["-m", "tests.plan.two_ranks", str(models), str(output)], 2, output)
    except UserError as error:
        return str(error)
    return code or [json.loads((output / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_two_ranks(peaks, models, tmp_path, case):
    assert isinstance(peaks, list), f"the ranks failed: {peaks}"
    config = step_config(models / case.model, tmp_path, TOKENS, DTYPE, case.recompute, case.sizes)
    config.rollout.prompts_per_step, config.rollout.group_size = case.samples, 1
    for rank, found in enumerate(peaks):
        stage = rank if case.sizes.pipeline > 1 else 0
        assert in_use(planned(config, 2, stage)) == pytest.approx(found[case.name], rel=0.15), f"rank {rank}"
