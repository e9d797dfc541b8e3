"""The four functions against float64 reference values, gradients included."""

import json
from pathlib import Path

import pytest
import torch

from ulorl_megatron.algorithm import group_advantages, importance_ratio, mastered_positive_mask, policy_loss

CASES = json.loads((Path(__file__).parent / "vectors.json").read_text())["cases"]


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c['inputs']['mode']}-{len(c['inputs']['log_probs'])}")
def test_reproduces_reference(case):
    given, expected = case["inputs"], case["expected"]
    log_probs = tensor(given["log_probs"]).requires_grad_()
    rewards = tensor(given["rewards"])
    sample_index = torch.tensor(given["sample_index"])

    advantages = group_advantages(rewards, torch.tensor(given["group_ids"]))
    ratio = importance_ratio(
        given["mode"], log_probs, tensor(given["old_log_probs"]), tensor(given["behaviour_log_probs"])
    )
    masked = mastered_positive_mask(
        log_probs, tensor(given["entropies"]), rewards, sample_index,
        tau=given["tau"], sigma=given["sigma"], entropy_scope=given["entropy_scope"],
    )  # fmt: skip
    loss, stats = policy_loss(
        log_probs, ratio, advantages, sample_index, masked,
        clip_low=given["clip_low"], clip_high=given["clip_high"], num_tokens=expected["tokens"],
    )  # fmt: skip
    loss.backward()

    close = dict(rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(advantages, tensor(expected["advantages"]), **close)
    torch.testing.assert_close(ratio.detach(), tensor(expected["ratio"]), **close)
    torch.testing.assert_close(loss.detach(), tensor(expected["loss"]), **close)
    torch.testing.assert_close(log_probs.grad, tensor(expected["grad_log_probs"]), **close)
    assert masked.tolist() == expected["masked"]
    for name in ("clipped_tokens", "masked_tokens", "tokens"):
        assert int(stats[name]) == expected[name], name
