import json

import pytest

from checkpoint_tools.architecture import Architecture
from checkpoint_tools.errors import ArchitectureError
from tests.checkpoint_tools.support import QWEN3_30B_A3B

NEW_DIALECT = {
    **{k: v for k, v in QWEN3_30B_A3B.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype", "num_experts")},
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "dtype": "bfloat16",
    "num_local_experts": 128,
}


def test_both_dialects_of_transformers_say_the_same():
    assert Architecture.from_hf(NEW_DIALECT) == Architecture.from_hf(QWEN3_30B_A3B)
    assert Architecture.from_hf(NEW_DIALECT).rope_theta == 1e6


def test_both_dialects_of_yarn_say_the_same():
    yarn = {"factor": 1.5, "original_max_position_embeddings": 95232}
    old = {**QWEN3_30B_A3B, "rope_scaling": {"type": "yarn", **yarn}}
    new = {**NEW_DIALECT, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **yarn}}
    assert Architecture.from_hf(old) == Architecture.from_hf(new)
    assert Architecture.from_hf(new).rope_scaling == {"rope_type": "yarn", **yarn}


def test_a_path_a_directory_and_a_mapping_are_read_alike(pristine):
    directory = pristine("moe")
    content = json.loads((directory / "config.json").read_text())
    assert Architecture.from_hf(directory) == Architecture.from_hf(directory / "config.json")
    assert Architecture.from_hf(directory) == Architecture.from_hf(content)


def test_what_transformers_writes_today_is_read(pristine):
    moe, tied = (Architecture.from_hf(pristine(kind)) for kind in ("moe", "tied"))
    assert (moe.num_experts, moe.experts_per_token, moe.norm_topk_prob, moe.tie_embeddings) == (8, 2, True, False)
    assert (tied.is_moe, tied.tie_embeddings, tied.rope_theta, tied.dtype) == (False, True, 1e4, "float32")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "llama"}, "model_type 'llama' is not supported; supported are qwen3, qwen3_moe"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"num_hidden_layers": None}, "num_hidden_layers must be a positive integer, found None"),
        ({"num_experts": "128"}, "num_experts must be a positive integer"),
        ({"num_key_value_heads": 5}, "num_attention_heads 32 is not a multiple of num_key_value_heads 5"),
        ({"dtype": "float32"}, "torch_dtype is 'bfloat16' and dtype is 'float32'"),
        ({"num_local_experts": 64}, "num_experts is 128 and num_local_experts is 64"),
        ({"rope_parameters": {"rope_theta": 1e4}}, "rope_theta and rope_parameters.rope_theta differ"),
    ],
)
def test_unsupported_or_contradictory_configs_are_named(change, said):
    with pytest.raises(ArchitectureError, match=said):
        Architecture.from_hf({**QWEN3_30B_A3B, **change})


def test_absent_and_broken_files_are_named(tmp_path):
    with pytest.raises(ArchitectureError, match="config.json: no such file"):
        Architecture.from_hf(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": ')
    with pytest.raises(ArchitectureError, match="config.json: not valid JSON"):
        Architecture.from_hf(tmp_path)
