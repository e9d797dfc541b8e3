"""The long-context configurations: accepted, fitting the true models, and the paper's settings in each."""

import json
from pathlib import Path

import pytest

from ulorl_megatron.cli import main
from ulorl_megatron.config import load
from ulorl_megatron.config.fit import check_fit
from ulorl_megatron.config.positions import architecture
from ulorl_megatron.config.schema import DmmptMode, Importance, Recompute, Release
from ulorl_megatron.plan.published import PUBLISHED

EXAMPLES = Path(__file__).parents[2] / "examples"
MODELS = {name.replace("-", "_"): fields for name, fields in PUBLISHED.items()}
LENGTHS = {"32k": 2**15, "64k": 2**16, "96k": 3 * 2**15, "128k": 2**17, "140k_yarn": 140800}
EVERY = [(model, length) for model in MODELS for length in LENGTHS]


@pytest.fixture
def config(model, length, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model]))
    return load(str(EXAMPLES / model / f"{length}.yaml"), [f"model.path={tmp_path}"])


@pytest.mark.parametrize(("model", "length"), EVERY)
def test_the_command_accepts_it(model, length, capsys):
    assert main(["config", str(EXAMPLES / model / f"{length}.yaml")]) == 0
    assert f"global_max_length: {LENGTHS[length]}" in capsys.readouterr().out


@pytest.mark.parametrize(("model", "length"), EVERY)
def test_it_fits_the_model_on_whole_nodes(config, model, length):
    check_fit(config, config.run.processes)
    sizes = config.policy.parallel
    assert config.run.processes % 8 == 0 and 8 % (sizes.tensor * sizes.context) == 0
    assert config.policy.recompute is Recompute.full
    longest = config.data.max_prompt_length + config.rollout.global_max_length
    budget = config.policy.max_tokens_per_rank * sizes.context
    assert longest <= budget < longest + 2 * sizes.tensor * sizes.context


@pytest.mark.parametrize(("model", "length"), EVERY)
def test_positions(config, model, length):
    arch = architecture(config.model)
    if length == "140k_yarn":
        assert arch.max_position_embeddings == 142848
        assert arch.rope_scaling == {"rope_type": "yarn", "factor": 1.5, "original_max_position_embeddings": 95232}
    else:
        assert arch.rope_scaling is None


@pytest.mark.parametrize(("model", "length"), EVERY)
def test_the_settings_of_the_paper(config, model, length):
    rollout, optimizer, evaluation = config.rollout, config.policy.optimizer, config.evaluation
    assert rollout.segment_count == rollout.global_max_length // 16384  # 140k: 8 of a little more than 16k
    assert (rollout.prompts_per_step, rollout.group_size) == (128, 8)
    assert (rollout.temperature, rollout.top_p, rollout.top_k) == (0.85, 1.0, -1)
    assert (optimizer.lr, optimizer.warmup_steps, optimizer.schedule.value) == (1e-6, 0, "constant")
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.2, 0.2)
    assert config.algorithm.importance is Importance.pois and config.experience.release is Release.sample
    assert (config.dmmpt.mode, config.dmmpt.tau, config.dmmpt.sigma) == (DmmptMode.dynamic, 0.99, 0.2)
    assert (evaluation.samples_per_prompt, evaluation.temperature) == (32, 0.85)
    assert (evaluation.top_p, evaluation.top_k) == (0.95, 20)
