"""The log-prob and entropy head against full logits."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ulorl_megatron.config import layout
from ulorl_megatron.policy.head import ScoreHead

TOKENS, HIDDEN, VOCAB = 21, 12, 50


def compute(head, hidden, weight, positions, labels):
    """The head as GPTModel calls it, on one rank."""
    layer = SimpleNamespace(tp_group=dist.group.WORLD, weight=weight)
    context = SimpleNamespace(positions=positions, labels=labels)
    config = SimpleNamespace(sequence_parallel=False)
    return head(hidden_states=hidden[:, None], output_layer=layer, output_weight=None, config=config, context=context)


@pytest.fixture
def inputs():
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=g, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, generator=g, requires_grad=True)
    positions = torch.tensor([1, 2, 3, 7, 8, 13, 20])
    return hidden, weight, positions, torch.randint(0, VOCAB, (len(positions),), generator=g)


def plain(hidden, weight, positions, labels, temperature):
    distribution = torch.log_softmax(hidden[positions] @ weight.t() / temperature, -1)
    return distribution.gather(-1, labels[:, None])[:, 0], -(distribution.exp() * distribution).sum(-1)


@pytest.fixture(params=[2**20, 24, 1], ids=["one-tile", "several-tiles", "a-word-a-tile"])
def tiles(request, monkeypatch):
    monkeypatch.setitem(layout._TILE, "cpu", request.param)


@pytest.mark.parametrize("chunk", [1, 3, 7, 1024])
@pytest.mark.parametrize("temperature", [0.6, 1.0])
def test_values_and_gradients(inputs, tiles, chunk, temperature):
    hidden, weight, positions, labels = inputs
    log_probs, entropies, *mastery = compute(ScoreHead(temperature, False, VOCAB, chunk), *inputs)
    expected, expected_entropies = plain(*inputs, temperature)
    torch.testing.assert_close(log_probs, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(entropies, expected_entropies, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(mastery, [expected, expected_entropies], atol=1e-6, rtol=1e-6)
    assert not entropies.requires_grad and not mastery[0].requires_grad and not mastery[1].requires_grad
    upstream = torch.randn(len(labels), generator=torch.Generator().manual_seed(1))
    actual = torch.autograd.grad((log_probs * upstream).sum(), (hidden, weight))
    wanted = torch.autograd.grad((expected * upstream).sum(), (hidden, weight))
    torch.testing.assert_close(actual, wanted, atol=1e-6, rtol=1e-5)


def test_tokens_without_gradient_are_left_out(inputs, tiles):
    hidden, weight, positions, labels = inputs
    upstream = torch.tensor([0.0, 2.0, 0.0, -1.0, 0.5, 0.0, 0.0])
    log_probs, *_ = compute(ScoreHead(0.85, False, VOCAB, 2), *inputs)
    actual = torch.autograd.grad((log_probs * upstream).sum(), (hidden, weight))
    expected, _ = plain(*inputs, 0.85)
    wanted = torch.autograd.grad((expected * upstream).sum(), (hidden, weight))
    torch.testing.assert_close(actual, wanted, atol=1e-6, rtol=1e-5)
    assert torch.equal(actual[0][positions[upstream == 0]], torch.zeros(4, HIDDEN))


def test_bfloat16_sums_in_float32(inputs, tiles):
    """As near to the float32 gradient of the same numbers as bfloat16 products allow, in one part or in many."""
    hidden, weight, positions, labels = ((x.detach().bfloat16() if x.is_floating_point() else x) for x in inputs)
    exact = [hidden.float().requires_grad_(), weight.float().requires_grad_()]
    rounded = [hidden.requires_grad_(), weight.requires_grad_()]
    wanted = torch.autograd.grad(plain(*exact, positions, labels, 0.85)[0].sum(), exact)
    for chunk in (1, 1024):
        log_probs, *_ = compute(ScoreHead(0.85, False, VOCAB, chunk), *rounded, positions, labels)
        for actual, expected in zip(torch.autograd.grad(log_probs.sum(), rounded), wanted, strict=True):
            assert actual.dtype == torch.bfloat16
            assert (actual.float() - expected).abs().max() < 2e-2 * expected.abs().max()


def test_mastery_scores_are_tempered_or_raw(inputs, tiles):  # OpenRLHF#1319
    tempered, raw = plain(*inputs, 0.5), plain(*inputs, 1.0)
    for head, expected in ((ScoreHead(0.5, False, VOCAB, 4), tempered), (ScoreHead(0.5, True, VOCAB, 4), raw)):
        log_probs, entropies, mastery_log_probs, mastery_entropies = compute(head, *inputs)
        torch.testing.assert_close(log_probs, tempered[0])
        torch.testing.assert_close(entropies, tempered[1])
        torch.testing.assert_close(mastery_log_probs, expected[0])
        torch.testing.assert_close(mastery_entropies, expected[1])


@pytest.mark.parametrize("content", [0.0, 1e4, float("nan"), float("-inf")])
def test_padding_rows_of_the_vocabulary_never_count(inputs, tiles, content):  # SkyRL#2259
    hidden, weight, positions, labels = inputs
    padded = torch.cat([weight.detach(), torch.full((14, HIDDEN), content)]).requires_grad_()
    head = ScoreHead(0.85, True, VOCAB, 4)
    actual = compute(head, hidden, padded, positions, labels)
    expected = compute(head, *inputs)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)
    gradient = torch.autograd.grad(actual[0].sum(), padded)[0]
    assert torch.equal(gradient[:VOCAB], torch.autograd.grad(expected[0].sum(), weight)[0])
    assert torch.equal(gradient[VOCAB:], torch.zeros(14, HIDDEN))


def test_no_scored_token_still_carries_a_zero_gradient(inputs):
    hidden, weight, _, _ = inputs
    none = torch.zeros(0, dtype=torch.int64)
    log_probs, *_ = compute(ScoreHead(0.85, False, VOCAB, 4), hidden, weight, none, none)
    log_probs.sum().backward()
    assert hidden.grad.abs().max() == 0 and weight.grad.abs().max() == 0


def test_extreme_logits_stay_finite(inputs, tiles):
    hidden, weight, positions, labels = inputs
    scores = compute(ScoreHead(0.01, True, VOCAB, 4), hidden * 100, weight, positions, labels)
    assert all(s.isfinite().all() for s in scores)
    assert (scores[1] >= 0).all()
