import pytest
from safetensors import safe_open

from checkpoint_tools.architecture import Architecture
from checkpoint_tools.name_map import by_name, canonical_name, weights
from checkpoint_tools.proof import prove_bijection
from tests.checkpoint_tools.support import QWEN3_30B_A3B


def test_the_real_qwen3_30b_a3b_has_the_published_counts():
    table = weights(Architecture.from_hf(QWEN3_30B_A3B))
    assert sum(len(weight.hf) for weight in table) == 18_867
    assert sum(weight.numel for weight in table) == 30_532_122_624


@pytest.mark.parametrize("kind", ["moe", "dense", "tied"])
def test_the_map_names_exactly_what_transformers_writes(pristine, kind):
    arch = Architecture.from_hf(pristine(kind))
    mapped = {n: s for w in weights(arch) for n, s in zip(w.hf, w.hf_shapes, strict=True)}
    with safe_open(pristine(kind) / "model.safetensors", "pt") as file:
        written = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (not a dict)
    assert mapped == written


@pytest.mark.parametrize("kind", ["moe", "dense", "tied"])
def test_no_element_is_lost_or_repeated(pristine, kind):
    arch = Architecture.from_hf(pristine(kind))
    table = weights(arch)
    proof = prove_bijection(arch, table)
    assert proof["hf_names_each_read_once"] == sum(len(weight.hf) for weight in table)
    assert {kind["layout"] for kind in proof["kinds_shown_by_index_tensors"]} == {"plain", "qkv", "gate_up"}


def test_tied_embeddings_have_no_output_layer(pristine):
    assert "output_layer.weight" in by_name(Architecture.from_hf(pristine("dense")))
    assert "output_layer.weight" not in by_name(Architecture.from_hf(pristine("tied")))


@pytest.mark.parametrize(
    ("local", "canonical"),
    [
        ("module.module.embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
        ("decoder.layers.1.self_attention.linear_qkv.weight", "decoder.layers.13.self_attention.linear_qkv.weight"),
        ("decoder.layers.0.input_layernorm.weight", "decoder.layers.12.input_layernorm.weight"),
        ("decoder.layers.0.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.12.input_layernorm.weight"),
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "decoder.layers.12.pre_mlp_layernorm.weight"),
        (
            "decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight",
            "decoder.layers.12.mlp.experts.local_experts.35.linear_fc1.weight",
        ),
        (
            "decoder.layers.0.mlp.experts.linear_fc2.weight15",
            "decoder.layers.12.mlp.experts.local_experts.47.linear_fc2.weight",
        ),
    ],
)
def test_local_names_become_global_in_both_specs(local, canonical):
    assert canonical_name(local, layer_offset=12, expert_offset=32) == canonical
    assert canonical in by_name(Architecture.from_hf(QWEN3_30B_A3B))


def test_an_unknown_parameter_is_no_weight():
    name = canonical_name("decoder.layers.0.mlp.experts.weight1", layer_offset=0, expert_offset=0)
    assert name not in by_name(Architecture.from_hf(QWEN3_30B_A3B))
