"""Tiny random Qwen3 models in the HF layout, with a byte-level tokenizer of their own (272 ids)."""

from pathlib import Path
from typing import Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

Kind = Literal["moe", "dense", "tied"]

PAD, EOS = 256, 257  # ids after the 256 bytes
VOCAB_SIZE = 272

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One id a byte, then <|pad|>, <|eos|>, <|im_start|>, <|im_end|>."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for special in ("<|pad|>", "<|eos|>", "<|im_start|>", "<|im_end|>"):
        vocab[special] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|eos|>",
        additional_special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_model(path: Path, kind: Kind = "moe", seed: int = 0, **overrides) -> Path:
    """Write config.json, model.safetensors (float32) and a tokenizer under `path`; returns `path`.

    kind: moe (8 experts, top-2), dense (untied), tied (dense, tied embeddings). 2 layers, hidden 64, 4 heads
    over 2 key-value groups, q/k norm. overrides: further fields of the HF config. The weights are 4 times
    HF's initial ones and the norms are off 1, so that greedy decoding is well separated and no norm can be
    left out unnoticed.
    """
    fields = dict(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=kind == "tied",
        eos_token_id=EOS,
        pad_token_id=PAD,
        bos_token_id=None,
    )
    if kind == "moe":
        fields.update(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32, norm_topk_prob=True)
    fields.update(overrides)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if kind == "moe":
            model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**fields))
        else:
            model = Qwen3ForCausalLM(Qwen3Config(**fields))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim >= 2:
                    parameter.mul_(4.0)
                else:
                    parameter.add_(0.1 * torch.randn_like(parameter))
    path.mkdir(parents=True, exist_ok=True)
    model.to(torch.float32).save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path
