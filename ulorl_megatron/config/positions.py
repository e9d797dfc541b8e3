"""Positions of the model where they differ from its config.json: the one place trainer, servers and exports ask."""

import json
from pathlib import Path
from typing import Any, Dict, Iterator

from checkpoint_tools.architecture import Architecture
from ulorl_megatron.config.schema import Config, ModelConfig

# SGLang refuses inputs of more than context - 7 tokens, and the longest lacks one token of the longest sample. It also
# stops two tokens before its context is full, and says nothing of it.
_CONTEXT_SLACK = 6


def context_length(config: Config) -> int:
    """Positions the servers must have: the longest prompt, the longest response and what they keep free."""
    return config.data.max_prompt_length + config.rollout.global_max_length + _CONTEXT_SLACK


def architecture(model: ModelConfig) -> Architecture:
    """The model's config.json with its positions as `model` has them. Raises checkpoint_tools' ArchitectureError."""
    return Architecture.from_hf(model.path, changed_fields(model))


def changed_fields(model: ModelConfig) -> Dict[str, Any]:
    """The fields of config.json that `model` replaces, spelt as transformers 4 or 5 did in that file; often none.

    They go to the trainer, to sglang's --json-model-override-args and into the config.json of exported weights.
    """
    if model.yarn_factor is None or model.yarn_original is None:
        return {} if model.max_positions is None else {"max_position_embeddings": model.max_positions}
    scaling: Dict[str, Any] = {
        "rope_type": "yarn",
        "factor": model.yarn_factor,
        "original_max_position_embeddings": model.yarn_original,
    }
    spelling = "rope_scaling"
    if json.loads((Path(model.path) / "config.json").read_text()).get("rope_parameters"):
        spelling = "rope_parameters"
        scaling["rope_theta"] = Architecture.from_hf(model.path).rope_theta
    # SGLang and transformers take the factor from the quotient of the two where they do not read it.
    return {"max_position_embeddings": round(model.yarn_factor * model.yarn_original), spelling: scaling}


def faults(model: ModelConfig) -> Iterator[str]:
    """What is wrong with the keys themselves, one line each."""
    factor, original = model.yarn_factor, model.yarn_original
    if model.max_positions is not None and model.max_positions < 1:
        yield f"model.max_positions: {model.max_positions} is below 1"
    if (factor is None) != (original is None):
        missing = "factor" if factor is None else "original"
        yield f"model.yarn_{missing}: no value; YaRN needs model.yarn_factor and model.yarn_original"
    if factor is None or original is None:
        return
    if factor <= 1:
        yield f"model.yarn_factor: {factor} is not above 1; without scaling set model.max_positions alone"
    if original < 1:
        yield f"model.yarn_original: {original} is below 1"
    positions = factor * original
    if positions != int(positions):
        yield f"model.yarn_factor: {factor} times model.yarn_original {original} is not a whole number of positions"
    elif model.max_positions not in (None, positions):
        yield (
            f"model.max_positions: {model.max_positions}, but YaRN makes {factor} x {original} = {positions:.0f} "
            "positions; leave it out"
        )
