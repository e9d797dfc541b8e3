"""Megatron runs without CUDA, and nobody else in the process notices."""

import sys
import types

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.policy.support import make_samples, objective, policy_config
from ulorl_megatron.policy import Policy, platform

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is adapted with CUDA")


def test_torch_stays_as_it_is():
    for function in (torch.empty, torch.empty_like, torch.zeros, torch.tensor, torch.cuda.current_device):
        assert function.__module__.startswith("torch") or isinstance(function, types.BuiltinFunctionType)
    assert torch.zeros(1).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1).cuda()


def test_a_transformers_model_keeps_its_rope_frequencies(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny(), dtype=torch.float32)
    exponents = torch.arange(0, 16, 2) / 16
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, 1 / 1e4**exponents)


def test_no_module_of_megatron_slips_in_late(tiny, tmp_path):
    """Whatever an update, a save and a load import must have been adapted."""
    policy = Policy(policy_config(tiny(), tmp_path))
    policy.update(make_samples(), objective())
    policy.save(1)
    policy.load_latest()
    loaded = [m for name, m in list(sys.modules.items()) if name.startswith("megatron.core")]
    assert len(loaded) > 100
    assert [m.__name__ for m in loaded if getattr(m, "torch", None) is torch] == []


def test_cuda_tensors_is_undone_after_an_error():
    with pytest.raises(KeyError), platform.cuda_tensors():
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        raise KeyError
    assert torch.zeros(1).type() == "torch.FloatTensor"
