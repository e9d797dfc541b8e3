"""What the map needs to know of a model, read from an HF config.json of either transformers dialect."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from checkpoint_tools.errors import ArchitectureError
from checkpoint_tools.families import FAMILIES

_HEAD_DIM_DEFAULT = 128  # of Qwen3Config and Qwen3MoeConfig; not hidden_size / num_heads
_ROPE_THETA_DEFAULT = 10000.0


@dataclass(frozen=True)
class Architecture:
    """Shape of a decoder-only model. Sizes are elements, not bytes.

    intermediate_size: of the dense MLP (an MoE config has one too; no weight uses it). moe_intermediate_size,
    num_experts, experts_per_token: None for a dense model. norm_topk_prob: the router renormalises over the
    experts it chose. rope_scaling: None without scaling, else the config's fields with `rope_type`, e.g.
    "yarn", and without the theta. dtype: as config.json says, None where it does not.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    intermediate_size: int
    moe_intermediate_size: int | None
    num_experts: int | None
    experts_per_token: int | None
    norm_topk_prob: bool
    tie_embeddings: bool
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    rms_norm_eps: float
    max_position_embeddings: int
    dtype: str | None

    @property
    def is_moe(self) -> bool:
        return self.num_experts is not None

    @classmethod
    def from_hf(
        cls, source: str | PathLike | Mapping[str, Any], changed: Mapping[str, Any] | None = None
    ) -> "Architecture":
        """Read config.json: its path, the directory that holds it, or its content. changed: fields that replace
        those of the file.

        transformers 4 writes rope_theta, rope_scaling, torch_dtype and num_experts; transformers 5 writes
        rope_parameters, dtype and num_local_experts. Both are read. Raises ArchitectureError for a missing
        or broken file, an unknown model_type, a feature the map does not cover (dense layers among MoE
        ones, attention bias, sliding windows), or a contradiction.
        """
        where, config = _load(source)
        config = {**config, **(changed or {})}
        model_type = config.get("model_type")
        if model_type not in FAMILIES:
            raise ArchitectureError(
                f"{where}: model_type {model_type!r} is not supported; supported are {', '.join(FAMILIES)}."
                " docs/checkpoints.md says how to add a family."
            )
        _refuse_unsupported(where, config)
        moe = model_type == "qwen3_moe"
        theta, scaling = _rope(where, config)
        architecture = cls(
            model_type=model_type,
            num_layers=_size(where, config, "num_hidden_layers"),
            hidden_size=_size(where, config, "hidden_size"),
            num_heads=_size(where, config, "num_attention_heads"),
            num_kv_heads=_size(where, config, "num_key_value_heads"),
            head_dim=_size(where, {"head_dim": _HEAD_DIM_DEFAULT, **_given(config)}, "head_dim"),
            vocab_size=_size(where, config, "vocab_size"),
            intermediate_size=_size(where, config, "intermediate_size"),
            moe_intermediate_size=_size(where, config, "moe_intermediate_size") if moe else None,
            num_experts=_num_experts(where, config) if moe else None,
            experts_per_token=_size(where, config, "num_experts_per_tok") if moe else None,
            norm_topk_prob=bool(config.get("norm_topk_prob", False)),
            tie_embeddings=bool(config.get("tie_word_embeddings", False)),
            rope_theta=theta,
            rope_scaling=scaling,
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            max_position_embeddings=_size(where, config, "max_position_embeddings"),
            dtype=_dtype(where, config),
        )
        if architecture.num_heads % architecture.num_kv_heads:
            raise ArchitectureError(
                f"{where}: num_attention_heads {architecture.num_heads} is not a multiple of"
                f" num_key_value_heads {architecture.num_kv_heads}."
            )
        return architecture


def _load(source: str | PathLike | Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    if isinstance(source, Mapping):
        return "config", source
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise ArchitectureError(f"{path}: no such file. Give the directory of an HF model.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ArchitectureError(f"{path}: not valid JSON ({error}). Fetch the file again.") from None
    if not isinstance(config, dict):
        raise ArchitectureError(f"{path}: holds no JSON object. Fetch the file again.")
    return str(path), config


def _given(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}


def _size(where: str, config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArchitectureError(f"{where}: {key} must be a positive integer, found {value!r}.")
    return value


def _refuse_unsupported(where: str, config: Mapping[str, Any]) -> None:
    unsupported = {
        "attention_bias": config.get("attention_bias", False) is not False,
        "decoder_sparse_step": config.get("decoder_sparse_step", 1) != 1,
        "mlp_only_layers": bool(config.get("mlp_only_layers")),
        "use_sliding_window": bool(config.get("use_sliding_window", False)),
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "quantization_config": config.get("quantization_config") is not None,
    }
    for key, found in unsupported.items():
        if found:
            raise ArchitectureError(f"{where}: {key} = {config[key]!r} is not supported by the map.")


def _rope(where: str, config: Mapping[str, Any]) -> tuple[float, dict[str, Any] | None]:
    """(theta, scaling) from `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (4)."""
    new = dict(config.get("rope_parameters") or {})
    old = dict(config.get("rope_scaling") or {})
    thetas = {float(v) for v in (new.pop("rope_theta", None), config.get("rope_theta")) if v is not None}
    if len(thetas) > 1:
        raise ArchitectureError(f"{where}: rope_theta and rope_parameters.rope_theta differ: {sorted(thetas)}.")
    for fields in (new, old):
        legacy = fields.pop("type", None)  # the spelling before `rope_type`
        if legacy is not None:
            fields.setdefault("rope_type", legacy)
    scalings = [f for f in (new, old) if f.get("rope_type", "default") != "default"]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise ArchitectureError(f"{where}: rope_scaling and rope_parameters differ: {old} and {new}.")
    return (thetas.pop() if thetas else _ROPE_THETA_DEFAULT), (scalings[0] if scalings else None)


def _num_experts(where: str, config: Mapping[str, Any]) -> int:
    spelling = _one_of(where, config, "num_experts", "num_local_experts")
    return _size(where, {"num_experts": spelling}, "num_experts")


def _dtype(where: str, config: Mapping[str, Any]) -> str | None:
    dtype = _one_of(where, config, "torch_dtype", "dtype")
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _one_of(where: str, config: Mapping[str, Any], old: str, new: str) -> Any:
    """The value of a key that has two spellings. Raises ArchitectureError when both are there and differ."""
    found = [config[key] for key in (old, new) if config.get(key) is not None]
    if len(found) == 2 and found[0] != found[1]:
        raise ArchitectureError(f"{where}: {old} is {found[0]!r} and {new} is {found[1]!r}; keep the right one.")
    return found[0] if found else None
