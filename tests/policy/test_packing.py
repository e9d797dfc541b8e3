"""Which rank takes what, and that packed tensors mean the samples they were made of."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint_tools.architecture import Architecture
from tests.checkpoint_tools.support import QWEN3_30B_A3B
from tests.policy.support import make_samples
from ulorl_megatron.algorithm.batch import TrainSample
from ulorl_megatron.policy.attention import zigzag_positions
from ulorl_megatron.policy.packing import PackingRules, attention_share, build, plan

CPU = torch.device("cpu")


def sample(length, prompt=1):
    n = length - prompt
    return TrainSample(0, torch.arange(length), prompt, 1.0, 1.0, torch.zeros(n), torch.zeros(n, dtype=torch.int64))


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(2, 300), min_size=1, max_size=40),
    budget=st.integers(16, 400),
    ranks=st.integers(1, 5),
    multiple=st.integers(1, 3),
    lockstep=st.integers(1, 3),
)
def test_every_sample_once_and_as_many_micro_batches_everywhere(lengths, budget, ranks, multiple, lockstep):
    """verl#6176, slime#1860: unequal counts deadlock the ranks."""
    samples = [sample(n) for n in lengths]
    ranks *= lockstep
    rules = PackingRules(budget, data_parallel=ranks, multiple=multiple, lockstep=lockstep, quadratic=0.01)
    ranks_of = plan(samples, rules)
    assert len(ranks_of) == ranks
    assert len({len(bins) for bins in ranks_of}) == 1 and len(ranks_of[0]) % multiple == 0
    bins = list(itertools.chain(*ranks_of))
    assert sorted(itertools.chain(*bins)) == list(range(len(samples)))
    for members in bins:
        assert len(members) <= 1 or sum(rules.padded(samples[i]) for i in members) <= budget


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "layout",
    [
        dict(data_parallel=4, context_parallel=8),
        dict(data_parallel=32, context_parallel=8),
        dict(data_parallel=8, context_parallel=4, tensor_parallel=2, multiple=4),
        dict(data_parallel=8, context_parallel=4, lockstep=2),
    ],
)
def test_a_long_tail_of_lengths_leaves_no_rank_behind(layout, seed):
    """1024 samples, log-normal, up to 128k tokens (benchmarks/packing.py): under 2 % of the tokens that are computed
    are padding or filler, and the slowest rank's work is within 3 % of the mean."""
    g = torch.Generator().manual_seed(seed)
    lengths = torch.randn(1024, generator=g).add(math.log(12_000)).exp().long().clamp(1, 131_072).tolist()
    samples = [sample(n + 500) for n in lengths]
    rules = PackingRules(133_120, **layout, quadratic=6.5e-5)
    ranks = plan(samples, rules)
    padded = [[[rules.padded(samples[i]) for i in members] or [rules.unit] for members in bins] for bins in ranks]
    useful = sum(n + 499 for n in lengths) / sum(n for bins in padded for members in bins for n in members)
    totals = [sum(rules.cost(n) for members in bins for n in members) for bins in padded]
    assert useful > 0.98
    assert max(totals) < 1.03 * sum(totals) / len(totals)


def test_micro_batches_of_ranks_in_lockstep_are_of_like_cost():
    """Where experts are spread over data-parallel ranks, the costliest micro-batch of each row is what all wait for."""
    g = torch.Generator().manual_seed(0)
    lengths = torch.randn(512, generator=g).mul(0.8).add(6).exp().clamp(2, 4096).long().tolist()
    samples = [sample(n) for n in lengths]

    def waits(lockstep):
        rules = PackingRules(8192, data_parallel=4, lockstep=lockstep, quadratic=1e-4)
        work = [
            [sum(rules.cost(rules.padded(samples[i])) for i in members) for members in bins]
            for bins in plan(samples, rules)
        ]
        return sum(max(row) for row in zip(*work, strict=True)) * 4 / sum(map(sum, work))

    assert waits(lockstep=4) < 1.01 and waits(lockstep=4) < waits(lockstep=1)


def test_the_work_of_a_token_pair():
    """One layer of one head: 2 multiplications a key and head dimension, half the keys are in the past."""
    fields = dict(QWEN3_30B_A3B, num_hidden_layers=1, hidden_size=10, num_attention_heads=2, num_key_value_heads=1)
    fields |= dict(head_dim=4, num_experts_per_tok=2, moe_intermediate_size=3, vocab_size=7)
    linear = 10 * (2 * 8 + 2 * 4) + 3 * 10 * 2 * 3 + 10 * 7
    assert attention_share(Architecture.from_hf(fields)) == 2 * 8 / 2 / linear
    dense = dict(fields, model_type="qwen3", intermediate_size=5, num_hidden_layers=3)
    assert attention_share(Architecture.from_hf(dense)) == 3 * 8 / (3 * (240 + 3 * 10 * 5) + 70)


@pytest.mark.parametrize("context", [1, 2])
@pytest.mark.parametrize("tensor", [1, 2])
def test_labels_stay_in_their_sequence(context, tensor):  # Megatron-LM#3551
    """Over the context-parallel ranks each response token is the label of its predecessor, once."""
    samples = make_samples(6)
    rules = PackingRules(10_000, 1, context_parallel=context, tensor_parallel=tensor)
    found = {}
    for rank in range(context):
        micro = build(samples, list(range(6)), rules, rank, CPU)
        assert micro.input_ids.numel() % tensor == 0
        inputs, position = micro.input_ids[0], micro.position_ids[0]
        index = micro.batch.sample_index
        offsets = torch.cat(micro.offsets)
        assert len(index) == len(offsets) == len(micro.labels) == len(micro.positions)
        for row, label, i, offset in zip(micro.positions, micro.labels, index, offsets, strict=True):
            s = samples[i]
            assert inputs[row] == s.tokens[s.prompt_length + offset - 1]
            assert position[row] == s.prompt_length + offset - 1
            assert label == s.tokens[s.prompt_length + offset]
            key = (int(i), int(offset))
            assert key not in found
            found[key] = rank
    assert len(found) == sum(s.response_length for s in samples)


def test_positions_start_again_in_each_sequence_under_context_parallelism():  # Megatron-LM#5243
    samples = [sample(5), sample(5)]
    rules = PackingRules(100, 1, context_parallel=2)
    micro = build(samples, [0, 1], rules, 0, CPU)
    assert micro.packed.cu_seqlens_q_padded.tolist() == [0, 4, 8]
    starts = torch.tensor([0, 0, 4, 4])
    assert (micro.position_ids[0] + starts).tolist() == [0, 3, 4, 7]
    assert micro.packed.max_seqlen_q == 4
    assert zigzag_positions(4, 0, 2).tolist() == [0, 3]


def test_what_the_objective_sees():
    samples = [replace(s, old_log_probs=s.behaviour_log_probs + 1) for s in make_samples(4)]
    micro = build(samples, [3, 1], PackingRules(1000, 1), 0, CPU)
    three, one = samples[3], samples[1]
    batch = micro.batch
    assert micro.members == [3, 1]
    assert batch.rewards.tolist() == [three.reward, one.reward]
    assert torch.equal(batch.behaviour_log_probs, torch.cat([three.behaviour_log_probs, one.behaviour_log_probs]))
    assert torch.equal(batch.old_log_probs, batch.behaviour_log_probs + 1)
    assert torch.bincount(batch.sample_index).tolist() == [three.response_length, one.response_length]
    assert torch.equal(batch.ages, torch.cat([three.ages, one.ages]))
    assert batch.masked is None


def test_a_rank_without_samples_gets_padding_to_run():
    samples = [replace(s, masked=torch.zeros(s.response_length, dtype=torch.bool)) for s in make_samples(2)]
    micro = build(samples, [], PackingRules(100, 2, context_parallel=2, tensor_parallel=2), 1, CPU)
    assert micro.input_ids.shape == (1, 4)
    assert micro.labels.numel() == 0 and micro.positions.numel() == 0
    assert micro.batch.masked.dtype == torch.bool and micro.batch.old_log_probs is None


def test_a_sample_without_prompt_is_refused():
    with pytest.raises(ValueError, match="prompt"):
        build([sample(4, prompt=0)], [0], PackingRules(100, 1), 0, CPU)
