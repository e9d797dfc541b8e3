"""The declarative map between HF and Megatron-Core weights: one table a model family.

A row says everything about a kind of weight; `name_map.weights` expands the rows over layers and experts.
Adding a family is adding a table here.
"""

from dataclasses import dataclass
from enum import Enum


class Layout(Enum):
    """How one Megatron weight is made of its HF weights.

    PLAIN: the same tensor. QKV: rows interleaved by key-value group, each [its query heads, key, value].
    GATE_UP: gate rows, then up rows.
    """

    PLAIN = "plain"
    QKV = "qkv"
    GATE_UP = "gate_up"


@dataclass(frozen=True)
class Row:
    """One kind of weight.

    megatron: parameter name of the local layer spec, with {layer} and {expert} counted over the whole model.
    hf: the HF weights it is made of, each a name and a shape in the words of `name_map`.
    checkpoint: key in a torch_dist checkpoint, where the layers (and experts) of a kind are stacked in front.
    parallel, dim: which group splits which dimension ("tp": tensor parallel, "etp": expert-tensor parallel).
    vocab: dimension 0 is the vocabulary, which Megatron pads.
    untied_only: the weight does not exist when embeddings are tied.
    """

    megatron: str
    hf: tuple[tuple[str, tuple[str, ...]], ...]
    checkpoint: str
    layout: Layout = Layout.PLAIN
    parallel: str | None = None
    dim: int | None = None
    vocab: bool = False
    untied_only: bool = False


def _norm(megatron: str, hf: str, size: str = "hidden", checkpoint: str | None = None) -> Row:
    key = checkpoint or megatron.replace(".{layer}", "")
    return Row(megatron, ((hf, (size,)),), key)


_LAYER, _HF_LAYER, _KEY = "decoder.layers.{layer}.", "model.layers.{layer}.", "decoder.layers."

_EMBEDDING = Row(
    "embedding.word_embeddings.weight",
    (("model.embed_tokens.weight", ("vocab", "hidden")),),
    "embedding.word_embeddings.weight",
    parallel="tp",
    dim=0,
    vocab=True,
)
_HEAD = (
    _norm("decoder.final_layernorm.weight", "model.norm.weight"),
    Row(
        "output_layer.weight",
        (("lm_head.weight", ("vocab", "hidden")),),
        "output_layer.weight",
        parallel="tp",
        dim=0,
        vocab=True,
        untied_only=True,
    ),
)
_ATTENTION = (
    # The key is the one of Transformer Engine's fused norm; the local spec renames to it, so that one set
    # serves both.
    _norm(
        _LAYER + "input_layernorm.weight",
        _HF_LAYER + "input_layernorm.weight",
        checkpoint=_KEY + "self_attention.linear_qkv.layer_norm_weight",
    ),
    Row(
        _LAYER + "self_attention.linear_qkv.weight",
        (
            (_HF_LAYER + "self_attn.q_proj.weight", ("query", "hidden")),
            (_HF_LAYER + "self_attn.k_proj.weight", ("key_value", "hidden")),
            (_HF_LAYER + "self_attn.v_proj.weight", ("key_value", "hidden")),
        ),
        _KEY + "self_attention.linear_qkv.weight",
        layout=Layout.QKV,
        parallel="tp",
        dim=0,
    ),
    _norm(_LAYER + "self_attention.q_layernorm.weight", _HF_LAYER + "self_attn.q_norm.weight", "head"),
    _norm(_LAYER + "self_attention.k_layernorm.weight", _HF_LAYER + "self_attn.k_norm.weight", "head"),
    Row(
        _LAYER + "self_attention.linear_proj.weight",
        ((_HF_LAYER + "self_attn.o_proj.weight", ("hidden", "query")),),
        _KEY + "self_attention.linear_proj.weight",
        parallel="tp",
        dim=1,
    ),
)
_DENSE_MLP = (
    _norm(
        _LAYER + "pre_mlp_layernorm.weight",
        _HF_LAYER + "post_attention_layernorm.weight",
        checkpoint=_KEY + "mlp.linear_fc1.layer_norm_weight",  # again the fused spelling
    ),
    Row(
        _LAYER + "mlp.linear_fc1.weight",
        (
            (_HF_LAYER + "mlp.gate_proj.weight", ("ffn", "hidden")),
            (_HF_LAYER + "mlp.up_proj.weight", ("ffn", "hidden")),
        ),
        _KEY + "mlp.linear_fc1.weight",
        layout=Layout.GATE_UP,
        parallel="tp",
        dim=0,
    ),
    Row(
        _LAYER + "mlp.linear_fc2.weight",
        ((_HF_LAYER + "mlp.down_proj.weight", ("hidden", "ffn")),),
        _KEY + "mlp.linear_fc2.weight",
        parallel="tp",
        dim=1,
    ),
)
_MOE_MLP = (
    _norm(_LAYER + "pre_mlp_layernorm.weight", _HF_LAYER + "post_attention_layernorm.weight"),
    Row(
        _LAYER + "mlp.router.weight",
        ((_HF_LAYER + "mlp.gate.weight", ("experts", "hidden")),),
        _KEY + "mlp.router.weight",
    ),
    Row(
        _LAYER + "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        (
            (_HF_LAYER + "mlp.experts.{expert}.gate_proj.weight", ("expert_ffn", "hidden")),
            (_HF_LAYER + "mlp.experts.{expert}.up_proj.weight", ("expert_ffn", "hidden")),
        ),
        _KEY + "mlp.experts.experts.linear_fc1.weight",
        layout=Layout.GATE_UP,
        parallel="etp",
        dim=0,
    ),
    Row(
        _LAYER + "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        ((_HF_LAYER + "mlp.experts.{expert}.down_proj.weight", ("hidden", "expert_ffn")),),
        _KEY + "mlp.experts.experts.linear_fc2.weight",
        parallel="etp",
        dim=1,
    ),
)

FAMILIES: dict[str, tuple[Row, ...]] = {
    "qwen3": (_EMBEDDING, *_ATTENTION, *_DENSE_MLP, *_HEAD),
    "qwen3_moe": (_EMBEDDING, *_ATTENTION, *_MOE_MLP, *_HEAD),
}

# Other spellings of the names in the `megatron` column: Transformer Engine fuses a norm into the linear layer
# after it, and groups the experts of a layer. (pattern, replacement) on the part after "decoder.layers.N.".
SPELLINGS: tuple[tuple[str, str], ...] = (
    (r"self_attention\.linear_qkv\.layer_norm_weight", "input_layernorm.weight"),
    (r"mlp\.linear_fc1\.layer_norm_weight", "pre_mlp_layernorm.weight"),
    (r"mlp\.experts\.linear_(fc[12])\.weight(\d+)", r"mlp.experts.local_experts.\2.linear_\1.weight"),
)
