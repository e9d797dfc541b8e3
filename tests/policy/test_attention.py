"""Packed causal attention against a softmax written out."""

from types import SimpleNamespace

import pytest
import torch

from ulorl_megatron.policy import attention
from ulorl_megatron.policy.attention import PackedCausalAttention, zigzag_positions
from ulorl_megatron.policy.packing import pack_lengths


def plain(q, k, v):
    """[n, heads, d] of one sequence; every group of query heads shares a key-value head."""
    k, v = (x.repeat_interleave(q.size(1) // k.size(1), dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.size(-1) ** -0.5
    scores = scores.masked_fill(~torch.ones(len(q), len(q), dtype=torch.bool).tril(), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


@pytest.fixture
def layer(one_rank):
    config = SimpleNamespace(kv_channels=8)
    groups = SimpleNamespace(cp=torch.distributed.group.WORLD)
    return PackedCausalAttention(config, 1, None, None, pg_collection=groups)


def qkv(tokens, seed=0):
    g = torch.Generator().manual_seed(seed)
    shapes = ((tokens, 4, 8), (tokens, 2, 8), (tokens, 2, 8))
    return [torch.randn(shape, generator=g, dtype=torch.float64, requires_grad=True) for shape in shapes]


def test_packed_sequences_do_not_see_each_other(layer):
    lengths = [5, 1, 12]
    q, k, v = qkv(sum(lengths))
    out = layer(q, k, v, packed_seq_params=pack_lengths(lengths, torch.device("cpu")))
    parts = zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True)
    expected = torch.cat([plain(*part) for part in parts]).flatten(1)
    torch.testing.assert_close(out, expected)
    weights = torch.randn_like(out)
    actual = torch.autograd.grad((out * weights).sum(), (q, k, v))
    torch.testing.assert_close(actual, torch.autograd.grad((expected * weights).sum(), (q, k, v)))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("block", [2, 2048])
def test_a_context_parallel_chunk_is_a_slice_of_the_whole(layer, size, block, monkeypatch):
    monkeypatch.setattr(attention, "_QUERY_BLOCK", block)
    n = 24 * size
    q, k, v = qkv(n)
    expected = plain(q, k, v)
    for rank in range(size):
        held = zigzag_positions(n, rank, size)
        for rows in held.chunk(2):
            out = layer._attend(q[rows], k, v, start=int(rows[0]))
            torch.testing.assert_close(out, expected[rows])


def test_zigzag_positions():
    assert zigzag_positions(5, 0, 1).tolist() == [0, 1, 2, 3, 4]
    assert zigzag_positions(4, 0, 2).tolist() == [0, 3]
    assert zigzag_positions(8, 1, 2).tolist() == [2, 3, 4, 5]
    for size in (2, 3):
        every = torch.cat([zigzag_positions(12 * size, rank, size) for rank in range(size)])
        assert sorted(every.tolist()) == list(range(12 * size))
    with pytest.raises(ValueError, match="6 tokens cannot be cut into 4 chunks"):
        zigzag_positions(6, 0, 2)


def test_only_packed_sequences_are_taken(layer):
    with pytest.raises(ValueError, match="packed"):
        layer(*qkv(4), attention_mask=None)
