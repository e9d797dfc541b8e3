"""What needs a GPU is refused before anything starts, with the value to set instead."""

import pytest
import torch

from tests.conftest import tiny_config
from ulorl_megatron.config.schema import Dtype, TransformerImpl
from ulorl_megatron.errors import UserError
from ulorl_megatron.preflight import check


@pytest.fixture
def config(tiny_moe, tmp_path):
    config = tiny_config(tmp_path / "run", tiny_moe)
    config.model.dtype = Dtype.bfloat16
    config.data.train = str(tmp_path / "train.jsonl")
    (tmp_path / "train.jsonl").write_text("")
    return config


@pytest.mark.skipif(torch.cuda.is_available(), reason="they are allowed with a GPU")
def test_without_a_gpu(config):
    check(config)
    config.policy.optimizer.offload = True
    with pytest.raises(UserError, match="policy.optimizer.offload: true is for a GPU.*set it to false"):
        check(config)
    config.policy.transformer_impl = TransformerImpl.te
    with pytest.raises(UserError, match="policy.transformer_impl: te is for a GPU.*set it to local"):
        check(config)


def test_te_with_a_gpu_but_without_transformer_engine(config, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr("ulorl_megatron.preflight.find_spec", lambda name: None)
    check(config)
    config.policy.transformer_impl = TransformerImpl.te
    with pytest.raises(UserError, match="install the extra `te`"):
        check(config)
