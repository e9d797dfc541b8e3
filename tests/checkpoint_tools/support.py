"""Configs in both dialects, and conversion without a progress bar."""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from checkpoint_tools.convert import Options, hf_to_megatron, megatron_to_hf
from checkpoint_tools.hf_files import HFReader
from checkpoint_tools.sources import open_checkpoint

QWEN3_30B_A3B = {  # as published, by transformers 4
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 151936,
}


class Quiet:
    """Progress that keeps count only."""

    def __init__(self) -> None:
        self.total = self.done = 0

    def start(self, total_bytes: int, done_bytes: int) -> None:
        self.total, self.done = total_bytes, done_bytes

    def advance(self, count: int) -> None:
        self.done += count


def to_megatron(hf: Path, out: Path, **options) -> Path:
    hf_to_megatron(open_checkpoint(hf), out, Options(**options), Quiet())
    return out


def to_hf(checkpoint: Path, out: Path, config: Path | None = None, **options) -> Path:
    megatron_to_hf(open_checkpoint(checkpoint, config), out, Options(**options), Quiet())
    return out


def tensors(hf: Path) -> dict[str, torch.Tensor]:
    reader = HFReader(hf)
    return {name: reader.read(name) for name in reader.entries}


def assert_bit_equal(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].dtype == tensor.dtype and torch.equal(actual[name], tensor), name


def edit_weights(hf: Path, *, remove: Sequence[str] = (), **changed: torch.Tensor) -> None:
    """Rewrite model.safetensors. changed: by name, given as **{name: tensor}."""
    content = load_file(hf / "model.safetensors")
    content.update(changed)
    for name in remove:
        del content[name]
    save_file(content, hf / "model.safetensors", metadata={"format": "pt"})
