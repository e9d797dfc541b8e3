"""Every kind of damage is an error that names the file and the key (Megatron-LM#5844,
Megatron-Bridge#3740)."""

import json
import shutil
import struct

import pytest
import torch

from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.hf_files import ShardWriter, read_header
from checkpoint_tools.sources import open_checkpoint
from tests.checkpoint_tools.support import edit_weights, tensors, to_hf, to_megatron

NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture
def sharded(hf, tmp_path):
    """An HF directory of several files with an index."""
    return to_hf(to_megatron(hf(), tmp_path / "m"), tmp_path / "sharded", shard_size=200_000)


def test_missing_key(hf):
    directory = hf()
    edit_weights(directory, remove=[NORM])
    with pytest.raises(CheckpointError, match=rf"1 key\(s\) are missing, first {NORM}"):
        open_checkpoint(directory)


def test_missing_layer_of_the_config(hf):
    directory = hf()
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(CheckpointError, match="first model.layers.2.input_layernorm.weight"):
        open_checkpoint(directory)


def test_unexpected_key(hf):
    directory = hf()
    edit_weights(directory, **{"model.layers.0.mlp.shared_expert.weight": torch.zeros(2)})
    with pytest.raises(CheckpointError, match="model.safetensors: 1 unexpected.*mlp.shared_expert.weight"):
        open_checkpoint(directory)


def test_wrong_shape(hf):
    directory = hf()
    edit_weights(directory, **{NORM: torch.zeros(63)})
    with pytest.raises(CheckpointError, match=rf"model.safetensors: {NORM} has shape \[63\].*asks for \[64\]"):
        open_checkpoint(directory)


def test_integer_weights(hf):
    directory = hf()
    edit_weights(directory, **{NORM: torch.zeros(64, dtype=torch.int64)})
    with pytest.raises(CheckpointError, match=f"{NORM} has dtype torch.int64"):
        open_checkpoint(directory)


def test_parts_of_one_weight_in_different_dtypes(hf):
    directory = hf("dense")
    edit_weights(directory, **{"model.layers.0.mlp.up_proj.weight": torch.zeros(128, 64).bfloat16()})
    with pytest.raises(CheckpointError, match="up_proj.weight have different dtypes"):
        open_checkpoint(directory)


def test_truncated_file(hf):
    file = hf() / "model.safetensors"
    with file.open("r+b") as stream:
        stream.truncate(file.stat().st_size - 1)
    with pytest.raises(CheckpointError, match=r"model.safetensors: truncated: \d+ bytes, its header describes \d+"):
        open_checkpoint(file.parent)


@pytest.mark.parametrize("content", [b"", b"abc", struct.pack("<Q", 2**40), struct.pack("<Q", 8) + b"{broken}"])
def test_corrupt_header(hf, content):
    directory = hf()
    (directory / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="model.safetensors: (truncated or corrupt|corrupt safetensors header)"):
        open_checkpoint(directory)


def test_file_cut_while_it_is_read(hf):
    directory = hf()
    source = open_checkpoint(directory)
    (directory / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="model.safetensors: truncated"):
        source.reader.read(NORM)


def test_index_names_an_absent_file(sharded):
    (sharded / "model-00002-of-00004.safetensors").unlink()
    with pytest.raises(CheckpointError, match="index.json: names model-00002-of-00004.safetensors, which is absent"):
        open_checkpoint(sharded)


def test_index_and_file_disagree(sharded):
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    del content["weight_map"][NORM]
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"holds key {NORM}, which"):
        open_checkpoint(sharded)
    content["weight_map"][NORM] = "model-00001-of-00004.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=f"model-00001-of-00004.safetensors: key {NORM} is missing"):
        open_checkpoint(sharded)


def test_broken_index(sharded):
    (sharded / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a safetensors index"):
        open_checkpoint(sharded)


def test_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="neither an HF model .* nor a torch_dist checkpoint"):
        open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="no such directory"):
        open_checkpoint(tmp_path / "nowhere")


def test_tied_head_must_be_the_embedding(hf):
    """Some tied models ship lm_head as well; it may only repeat the embedding."""
    directory = hf("tied")
    embedding = tensors(directory)["model.embed_tokens.weight"]
    edit_weights(directory, **{"lm_head.weight": embedding.clone()})
    assert open_checkpoint(directory).redundant == ["lm_head.weight"]
    embedding[5, 5] += 1
    edit_weights(directory, **{"lm_head.weight": embedding})
    with pytest.raises(CheckpointError, match="lm_head.weight differs from the embedding"):
        open_checkpoint(directory)


def test_torch_dist_without_its_metadata_or_files(hf, tmp_path):
    good = to_megatron(hf(), tmp_path / "m")
    for damage, said in (
        (lambda d: (d / ".metadata").unlink(), "neither an HF model"),
        (lambda d: (d / ".metadata").write_bytes(b"\x80"), ".metadata: cannot be read"),
        (lambda d: (d / "__0_0.distcp").unlink(), "__0_0.distcp: named in .metadata, but absent"),
        (lambda d: (d / "__0_0.distcp").write_bytes(b"x"), "__0_0.distcp: truncated: 1 bytes"),
        (lambda d: shutil.rmtree(d / "hf"), "Name the HF directory .* with --hf-config"),
    ):
        bad = tmp_path / "bad"
        shutil.copytree(good, bad)
        damage(bad)
        with pytest.raises(CheckpointError, match=said):
            open_checkpoint(bad)
        shutil.rmtree(bad)


def test_torch_dist_with_overwritten_bytes(hf, tmp_path):
    checkpoint = to_megatron(hf(), tmp_path / "m")
    file = checkpoint / "__0_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: corrupt at byte \d+, (embedding|decoder)\.\S+weight"):
        to_hf(checkpoint, tmp_path / "out")


def test_torch_dist_of_another_model(hf, tmp_path):
    checkpoint = to_megatron(hf(), tmp_path / "m")
    with pytest.raises(CheckpointError, match="first decoder.layers.mlp.linear_fc1.layer_norm_weight"):
        open_checkpoint(checkpoint, hf("dense"))
    config = json.loads((checkpoint / "hf" / "config.json").read_text())
    (checkpoint / "hf" / "config.json").write_text(json.dumps({**config, "moe_intermediate_size": 16}))
    with pytest.raises(CheckpointError, match=r"linear_fc1.weight has size \[2, 8, 64, 64\].*\[2, 8, 32, 64\]"):
        open_checkpoint(checkpoint)


def test_a_shard_file_appears_whole_or_not_at_all(tmp_path):
    file = tmp_path / "x.safetensors"
    entries = [("a", torch.float32, (2, 3)), ("b", torch.bfloat16, (4,))]
    with pytest.raises(CheckpointError, match="b was planned but never written"), ShardWriter(file, entries) as writer:
        writer.put("a", torch.ones(2, 3))
    assert list(tmp_path.iterdir()) == []
    for put, said in (
        (lambda w: w.put("c", torch.ones(1)), "c was not planned"),
        (lambda w: w.put("a", torch.ones(3, 2)), "a has shape"),
        (lambda w: w.put("a", torch.ones(2, 3).bfloat16()), "a is torch.bfloat16"),
        (lambda w: (w.put("a", torch.ones(2, 3)), w.put("a", torch.ones(2, 3))), "a is written twice"),
    ):
        with pytest.raises(CheckpointError, match=said), ShardWriter(file, entries) as writer:
            put(writer)
        assert list(tmp_path.iterdir()) == []


def test_a_shard_file_is_readable_by_safetensors(tmp_path):
    from safetensors.torch import load_file

    content = {
        "a": torch.randn(5, 3)[:, 1:],
        "b": torch.arange(4),
        "c": torch.tensor(2.0).half(),
        "d": torch.empty(0, 3),
    }
    planned = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in content.items()]
    with ShardWriter(tmp_path / "x.safetensors", planned) as writer:
        for name, tensor in content.items():
            writer.put(name, tensor)
    back = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(back[name], tensor) for name, tensor in content.items())
    assert [entry.name for entry in read_header(tmp_path / "x.safetensors") if entry.nbytes] == ["a", "b", "c"]
