"""The gradient of a step depends on its samples alone: not on how they are split, ordered or computed.

Over data-, context-, tensor-, expert- and pipeline-parallel ranks, some of them without samples: tests/parallel.
"""

import json
import random
import shutil
from dataclasses import replace

import pytest
import torch
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from transformers import AutoModelForCausalLM

from tests.policy.support import hf_weights, make_samples, objective, policy_config, read_out_gradients
from ulorl_megatron.config.schema import Recompute
from ulorl_megatron.policy import Policy

ROUTERS = [f"model.layers.{layer}.mlp.gate.weight" for layer in range(2)]


def gradients(config, samples, loss):
    """1000 times the gradient, by HF name, and the step's statistics."""
    read_out_gradients(config)
    policy = Policy(config)
    before = hf_weights(policy)
    stats = policy.update(samples, loss)
    after = hf_weights(policy)
    return {name: before[name] - after[name] for name in before}, stats


def assert_same(actual, expected, factor=1.0):
    """Relative to the largest element of each tensor; an expert without a token has no gradient at all."""
    for name, gradient in expected.items():
        difference = (actual[name] - factor * gradient).abs().max()
        assert difference <= 1e-4 * factor * gradient.abs().max(), f"{name}: {difference:.1e}"


@pytest.mark.parametrize("seed", range(8))
def test_split_order_recomputation_and_chunks_do_not_matter(tiny, tmp_path, seed):  # verl#906, #7200, #7321
    draw = random.Random(seed)
    config = policy_config(tiny(draw.choice(["moe", "dense"])), tmp_path)
    samples = make_samples(draw.randint(1, 12), seed, longest=draw.choice([8, 60, 200]))
    loss = objective(draw.choice(["off", "always", "dynamic"]), sigma=5.35, tau=2e-3)
    config.policy.max_tokens_per_rank = 100_000
    expected, one = gradients(config, samples, loss)
    assert one.micro_batches == 1
    for _ in range(3):
        config.policy.max_tokens_per_rank = draw.choice([1, 16, 64, 300])
        config.policy.head_chunk_tokens = draw.choice([1, 7, 64])
        config.policy.recompute = draw.choice(list(Recompute))
        shuffled = draw.sample(samples, len(samples))
        actual, stats = gradients(config, shuffled, loss)
        assert_same(actual, expected)
        assert stats.tokens == one.tokens
        assert stats.sums == pytest.approx(one.sums, rel=1e-5, abs=1e-5)
        assert stats.maxima == pytest.approx(one.maxima, rel=1e-5)


@pytest.mark.parametrize("budget", [16, 100_000])
def test_masked_tokens_stay_in_the_denominator(tiny, tmp_path, budget):
    """Samples of which every token is masked only dilute the gradient of the others."""
    config = policy_config(tiny(), tmp_path)
    config.policy.max_tokens_per_rank = budget
    samples = make_samples(8)
    wrong, right = ([s for s in samples if s.reward == reward] for reward in (0.0, 1.0))
    expected, alone = gradients(config, wrong, objective())
    actual, stats = gradients(config, [*right, *wrong], objective("always", tau=1e-30))
    assert stats.tokens == sum(s.response_length for s in samples)
    assert stats.sums["masked_tokens"] == sum(s.response_length for s in right)
    assert_same(actual, expected, factor=alone.tokens / stats.tokens)


def test_samples_without_advantage_only_dilute_too(tiny, tmp_path):
    config = policy_config(tiny("dense"), tmp_path)
    samples = make_samples(6)
    expected, alone = gradients(config, samples, objective())
    mute = [replace(s, advantage=0.0) for s in make_samples(5, seed=3)]
    actual, stats = gradients(config, samples + mute, objective())
    assert_same(actual, expected, factor=alone.tokens / stats.tokens)


def test_the_router_gets_no_gradient_of_an_auxiliary_loss(tiny, tmp_path):  # SkyRL#838, NeMo-RL#3169
    """Whatever config.json's coefficient is, bit for bit; in transformers' own loss it would show."""
    results = {}
    for coefficient in (0.001, 0.0, 1000.0):
        path = tmp_path / str(coefficient)
        shutil.copytree(tiny(), path)
        fields = json.loads((path / "config.json").read_text())
        assert fields["router_aux_loss_coef"] == 0.001
        (path / "config.json").write_text(json.dumps(fields | {"router_aux_loss_coef": coefficient}))
        results[coefficient], _ = gradients(policy_config(path, tmp_path), make_samples(), objective())
    for name, gradient in results[0.001].items():
        assert torch.equal(results[0.0][name], gradient) and torch.equal(results[1000.0][name], gradient), name
    assert get_moe_metrics_tracker().metrics == {}

    hf = AutoModelForCausalLM.from_pretrained(tiny(), dtype=torch.float32)
    tokens = make_samples()[2].tokens[None]
    hf(input_ids=tokens, output_router_logits=True).aux_loss.mul(0.001).backward()
    for name in ROUTERS:
        leaked = 1000 * hf.get_parameter(name).grad.abs().max()
        assert leaked > 1e-4 * results[0.001][name].abs().max(), "too small to be seen by this suite"
