"""What a configuration asks of its model: layout, ranks and positions against the model's config.json."""

from pathlib import Path
from typing import Iterator, List, Optional

from checkpoint_tools.architecture import Architecture
from ulorl_megatron.config import layout
from ulorl_megatron.config.positions import architecture, context_length
from ulorl_megatron.config.schema import Config
from ulorl_megatron.errors import UserError

# Of config.json's YaRN fields: what the trainer and the servers compute alike.
_YARN_FIELDS = {"rope_type", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate"}


def check_fit(config: Config, ranks: int, arch: Optional[Architecture] = None) -> None:
    """Raises UserError with one line per fault of the layout on `ranks` trainer ranks, or of the model for it.

    arch: the model; None: that of model.path's config.json, and without one only the number of ranks is checked. Raises
    ArchitectureError for a config.json that is broken or of no supported model.
    """
    problems = faults(config, ranks, arch)
    if problems:
        raise UserError("\n".join([f"this cannot train on {ranks} ranks:"] + [f"  {line}" for line in problems]))


def faults(config: Config, ranks: int, arch: Optional[Architecture] = None) -> List[str]:
    """What check_fit raises, as lines "section.key: what is wrong"."""
    sizes = config.policy.parallel
    if arch is None:
        if not (Path(config.model.path) / "config.json").is_file():
            return [f"policy.parallel: {reason}" for reason in layout.rank_faults(sizes, ranks)]
        arch = architecture(config.model)
    return [
        *(f"policy.parallel: {reason}" for reason in layout.faults(sizes, arch, ranks)),
        *(f"model.path: {reason}" for reason in model_faults(arch)),
        *_position_faults(config, arch),
    ]


def model_faults(arch: Architecture) -> Iterator[str]:
    """Why the trainer cannot compute what config.json describes, one reason each."""
    if arch.num_experts is not None:
        if arch.experts_per_token > arch.num_experts:
            yield f"num_experts_per_tok {arch.experts_per_token} of {arch.num_experts} experts"
        if arch.experts_per_token == 1 and arch.norm_topk_prob:
            yield (
                "num_experts_per_tok 1 with norm_topk_prob gives the router no gradient (its weight is always 1), "
                "which Megatron-Core refuses"
            )
    if arch.head_dim % 2:
        yield f"head_dim {arch.head_dim} is odd, and the rotary embedding turns pairs"
    if arch.rope_scaling is None:
        return
    kind = arch.rope_scaling["rope_type"]
    if kind != "yarn":
        yield f"rope scaling {kind!r} is not supported; it may be yarn or none"
        return
    for field in ("factor", "original_max_position_embeddings"):
        if arch.rope_scaling.get(field) is None:
            yield f"rope scaling yarn has no {field}"
    for field in sorted(arch.rope_scaling.keys() - _YARN_FIELDS):
        if arch.rope_scaling[field] is not None:
            yield f"rope scaling field {field} is not supported; remove it from config.json"


def _position_faults(config: Config, arch: Architecture) -> Iterator[str]:
    needed = context_length(config)
    if needed > arch.max_position_embeddings:
        yield (
            f"rollout.global_max_length: with data.max_prompt_length and what a server keeps free a sequence takes "
            f"{needed} positions, the model has {arch.max_position_embeddings}. Shorten them, set model.max_positions "
            f"to {needed} to extend the model without scaling, or set model.yarn_factor and model.yarn_original"
        )
