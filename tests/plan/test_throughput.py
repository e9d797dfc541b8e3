"""Expected time: its FLOPs against those torch counts in a real update, its terms against what they are made of."""

from dataclasses import replace

import pytest
from torch.utils.flop_counter import FlopCounterMode

from tests.plan.support import make_models, run_update, step_config
from ulorl_megatron.config.layout import padded_vocab_size
from ulorl_megatron.config.positions import architecture
from ulorl_megatron.config.schema import Config, Dtype, ParallelConfig, Recompute, TransformerImpl
from ulorl_megatron.plan.cards import ATTENTION, EXPERT, LINEAR, LINK, card
from ulorl_megatron.plan.layout import Layout, of_config
from ulorl_megatron.plan.published import planned_architecture
from ulorl_megatron.plan.throughput import NETWORK, NVLINK, forward_flops, model_flops, throughput

RATES = card("h100-80", 1).rates


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("models"))


def layout(name="qwen3-30b-a3b", world=32, te=True, recompute=Recompute.full, **sizes) -> Layout:
    config = Config()
    config.model.path, config.model.max_positions = name, 140000
    config.policy.parallel = ParallelConfig(**sizes)
    config.policy.recompute = recompute
    config.policy.transformer_impl = TransformerImpl.te if te else TransformerImpl.local
    return of_config(config, planned_architecture(config.model, None)[0], world, imbalance=1.5, cuda=True)


def terms(planned: Layout):
    return {term.name: term for term in throughput(planned, RATES).terms}


@pytest.mark.parametrize("recompute", [Recompute.none, Recompute.full])
@pytest.mark.parametrize("model", ["dense", "moe"])
def test_matrix_products_of_a_real_update(models, tmp_path, model, recompute):
    config = step_config(models / model, tmp_path, 256, Dtype.float32, recompute, ParallelConfig())
    counted = FlopCounterMode(display=False)

    def count(step):
        with counted:
            step()
        return 0

    run_update(config, 1, count)
    products = sum(n for op, n in counted.get_flop_counts()["Global"].items() if "mm" in str(op))
    arch = architecture(config.model)
    planned = of_config(config, arch, 1, imbalance=1.0, cuda=False)
    linear, expert, _ = forward_flops(planned)
    passes = 4 if recompute is Recompute.full else 3
    scored = config.rollout.global_max_length
    head = 4 * 2 * arch.hidden_size * padded_vocab_size(arch, 1) * scored
    assert products == passes * arch.num_layers * (linear + expert) * planned.tokens + head


def test_flops_of_a_token_are_six_a_weight_it_meets():
    """3.3e9 weights of the 30.5e9, the embedding not among them; and attention over half the sequence."""
    planned = layout(context=8, expert=8)
    attention = 12 * 48 * 32 * 128 * planned.sequence / 2
    assert model_flops(planned) - attention == pytest.approx(6 * (3.35e9 - 151936 * 2048), rel=0.01)


def test_compute_is_work_over_rate():
    planned = layout(context=8, expert=8)
    assert planned.tokens == 16640 and planned.micro_batches == 32  # 128 samples over 4 replicas
    tokens, found = 32 * 16640 * 48, terms(planned)
    linear, expert, attention = forward_flops(planned)
    assert found["dense layers"].seconds == pytest.approx(tokens * 4 * linear / (LINEAR * RATES.peak))
    assert found["experts"].seconds == pytest.approx(tokens * 4 * 1.5 * expert / (EXPERT * RATES.peak))
    assert found["attention"].seconds == pytest.approx(tokens * 4.5 * attention / (ATTENTION * RATES.peak))


def test_experts_within_a_node_and_across():
    within, across = (terms(layout(context=8, expert=n))["expert parallel"] for n in (8, 16))
    assert within.bound == NVLINK and across.bound == NETWORK and across.seconds > 2 * within.seconds
    sent = 32 * 48 * 6 * 1.5 * 16640 * 8 * 2048 * 2  # micro-batches, layers, passes, tokens of 8 experts, bytes
    assert within.seconds == pytest.approx(sent * 7 / 8 / (LINK * RATES.nvlink))


def test_the_bubble_is_the_stages_that_wait():
    flat, deep = layout(context=8, expert=8), layout(context=8, pipeline=4)
    interleaved = layout(context=8, pipeline=4, virtual_pipeline=4)
    assert "pipeline bubble" not in terms(flat)
    work = sum(t.seconds for name, t in terms(deep).items() if name not in ("pipeline bubble", "gradients", "weights"))
    bubble = terms(deep)["pipeline bubble"].seconds
    work -= sum(t.seconds for name, t in terms(deep).items() if name.startswith("experts' "))
    assert bubble == pytest.approx(work * 3 / deep.micro_batches)
    assert terms(interleaved)["pipeline bubble"].seconds == pytest.approx(bubble / 4, rel=0.05)


def test_gradients_hide_behind_the_last_backward_pass_only_if_told():
    planned = layout(context=8, expert=8)
    assert terms(planned)["gradients"].bound == NETWORK
    assert "gradients" not in terms(replace(planned, overlap_gradients=True))


def test_offloaded_moments_cost_the_bus():
    planned = layout(context=8, expert=8)
    slower = throughput(replace(planned, offload=True), RATES)
    assert slower.terms[-1].bound == "PCIe" and slower.seconds > throughput(planned, RATES).seconds


def test_shares_and_totals_are_of_the_terms():
    speed = throughput(layout(tensor=2, context=4, pipeline=2, expert=4), RATES)
    assert sum(speed.shares.values()) == pytest.approx(1)
    assert speed.per_second == pytest.approx(128 * 133120 / sum(t.seconds for t in speed.terms))
    assert 0 < speed.utilisation < 0.5
