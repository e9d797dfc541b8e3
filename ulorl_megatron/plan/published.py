"""The shapes of published models, so that a layout can be planned before gigabytes are fetched."""

from pathlib import Path
from typing import Any, Dict, Optional, Tuple

from checkpoint_tools.architecture import Architecture
from ulorl_megatron.config.positions import architecture
from ulorl_megatron.config.schema import ModelConfig
from ulorl_megatron.errors import UserError

_COMMON: Dict[str, Any] = {
    "head_dim": 128,
    "vocab_size": 151936,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "bfloat16",
}

# The fields of each config.json that Architecture reads, by the folder name the model is published under.
PUBLISHED: Dict[str, Dict[str, Any]] = {
    "qwen3-4b": {
        **_COMMON,
        "model_type": "qwen3",
        "num_hidden_layers": 36,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        **_COMMON,
        "model_type": "qwen3",
        "num_hidden_layers": 36,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "qwen3-30b-a3b": {
        **_COMMON,
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
}


def planned_architecture(model: ModelConfig, name: Optional[str]) -> Tuple[Architecture, str]:
    """(architecture, where it is from) of the published model `name`, or of model.path.

    Where model.path holds no config.json, a folder name of PUBLISHED is enough. Raises UserError if neither is there.
    """
    if name is None and (Path(model.path) / "config.json").is_file():
        return architecture(model), str(Path(model.path) / "config.json")
    key = (name or Path(model.path).name).lower()
    if key not in PUBLISHED:
        missing = f"--model: {name} is not known" if name else f"model.path: {model.path} holds no config.json"
        raise UserError(f"{missing}; known by name (--model NAME, or the last part of model.path): {_names()}")
    positions = model.max_positions
    if model.yarn_factor is not None and model.yarn_original is not None:
        positions = round(model.yarn_factor * model.yarn_original)
    changed = {} if positions is None else {"max_position_embeddings": positions}
    return Architecture.from_hf(PUBLISHED[key], changed), f"the published shape of {key}"


def _names() -> str:
    return ", ".join(PUBLISHED)
