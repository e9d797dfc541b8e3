import errno
import json
import shutil
import signal
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoint_tools import convert, sources, torch_dist
from checkpoint_tools.convert import Options, hf_to_megatron, megatron_to_hf
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.sources import open_checkpoint
from checkpoint_tools.torch_dist import TorchDistReader
from checkpoint_tools.verify import compare
from tests.checkpoint_tools.support import Quiet, assert_bit_equal, edit_weights, tensors, to_hf, to_megatron

ROOT = Path(__file__).parents[2]


@pytest.fixture
def small_files(monkeypatch):
    """Files and blocks so small that a tiny model has many."""
    monkeypatch.setattr(convert, "PART_BYTES", 100_000)
    monkeypatch.setattr(sources, "BLOCK_BYTES", 3_000)


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["moe", "dense", "tied"])
def test_the_round_trip_is_bit_equal(pristine, tmp_path, small_files, kind, dtype, workers):
    expected = {name: tensor.to(dtype) for name, tensor in tensors(pristine(kind)).items()}
    checkpoint = to_megatron(pristine(kind), tmp_path / "m", dtype=dtype, workers=workers)
    assert len(list(checkpoint.glob("__0_*.distcp"))) > 1
    back = to_hf(checkpoint, tmp_path / "back", shard_size=90_000, workers=workers)
    assert len(list(back.glob("model-*.safetensors"))) > 1
    assert_bit_equal(tensors(back), expected)


@pytest.mark.parametrize("kind", ["moe", "tied"])
def test_every_element_arrives_exactly_once(hf, tmp_path, small_files, kind):
    """A model whose elements are their own numbers, converted for real."""
    directory = hf(kind)
    start, numbered = 0, {}
    for name, tensor in tensors(directory).items():
        numbered[name] = torch.arange(start, start + tensor.numel(), dtype=torch.float32).view(tensor.shape)
        start += tensor.numel()
    assert start < 2**24  # float32 holds them exactly
    save_file(numbered, directory / "model.safetensors", metadata={"format": "pt"})
    reader = TorchDistReader(to_megatron(directory, tmp_path / "m"))
    places = [place for key in reader.tensors for place in _places(reader, key)]
    arrived = torch.cat([reader.read(*place).flatten() for place in places])
    assert torch.equal(arrived.sort().values, torch.arange(start, dtype=torch.float32))


def _places(reader, key):
    """Arguments of reader.read() for every tensor stacked under the key."""
    lead = 0 if not key.startswith("decoder.layers") else 2 if ".experts." in key else 1
    return [(key, index) for index in product(*map(range, reader.tensors[key][1][:lead]))]


def test_the_hf_side_loads_in_transformers(pristine, tmp_path):
    back = to_hf(to_megatron(pristine("moe"), tmp_path / "m"), tmp_path / "back", shard_size=90_000)
    ids = torch.arange(20)[None]
    ours, theirs = (AutoModelForCausalLM.from_pretrained(p)(ids).logits for p in (back, pristine("moe")))
    assert torch.equal(ours, theirs)
    assert AutoTokenizer.from_pretrained(back).encode("2+2") == AutoTokenizer.from_pretrained(pristine("moe")).encode(
        "2+2"
    )
    assert (back / "generation_config.json").is_file() and (back / "chat_template.jinja").is_file()


def test_dtype_is_converted_and_written_in_the_config(pristine, tmp_path):
    back = to_hf(to_megatron(pristine("dense"), tmp_path / "m"), tmp_path / "back", dtype=torch.bfloat16)
    assert json.loads((back / "config.json").read_text())["dtype"] == "bfloat16"
    assert {tensor.dtype for tensor in tensors(back).values()} == {torch.bfloat16}


def test_the_certificate_accounts_for_everything(pristine, tmp_path):
    checkpoint = to_megatron(pristine("moe"), tmp_path / "m")
    back = to_hf(checkpoint, tmp_path / "back")
    there, again = (json.loads((path / "conversion.json").read_text()) for path in (checkpoint, back))
    assert there["hf_tensors"] == there["proof"]["hf_names_each_read_once"] == len(tensors(pristine("moe")))
    assert there["elements"] == sum(tensor.numel() for tensor in tensors(pristine("moe")).values())
    assert there["map"] == again["map"] and len(there["map"]["sha256"]) == 64
    assert there["tensors"] == again["tensors"]
    assert len({facts["hash"] for facts in there["tensors"].values()}) == len(there["tensors"])


def test_the_hash_is_that_of_the_bytes(pristine, tmp_path):
    certificate = json.loads((to_megatron(pristine("tied"), tmp_path / "m") / "conversion.json").read_text())
    for name, tensor in tensors(pristine("tied")).items():
        assert certificate["tensors"][name]["hash"] == xxhash.xxh3_128(tensor.numpy().tobytes()).hexdigest()


class Stop(Exception):
    pass


def _stop_after(monkeypatch, target, method, count):
    """Make a method fail, as a kill would, after so many calls."""
    original, calls = getattr(target, method), []

    def failing(*args, **kwargs):
        calls.append(1)
        if len(calls) > count:
            raise Stop
        return original(*args, **kwargs)

    monkeypatch.setattr(target, method, failing)


def test_an_interrupted_conversion_goes_on(pristine, tmp_path, small_files, monkeypatch):
    with monkeypatch.context() as patch:
        _stop_after(patch, torch_dist.PartWriter, "put", 60)
        with pytest.raises(Stop):
            to_megatron(pristine("moe"), tmp_path / "m")
    partial = tmp_path / "m.partial"
    done = {file.name: file.stat().st_ino for file in partial.glob("*.distcp")}
    assert done and not (tmp_path / "m").exists()
    progress = Quiet()
    hf_to_megatron(open_checkpoint(pristine("moe")), tmp_path / "m", Options(), progress)
    assert progress.done == progress.total == 636_416
    assert all((tmp_path / "m" / name).stat().st_ino == inode for name, inode in done.items())
    assert not partial.exists()
    assert_bit_equal(tensors(to_hf(tmp_path / "m", tmp_path / "back")), tensors(pristine("moe")))


KILLED = """
import os, signal, sys
from pathlib import Path
from checkpoint_tools import convert, torch_dist
from tests.checkpoint_tools.support import to_megatron
convert.PART_BYTES = 100_000
put, calls = torch_dist.PartWriter.put, []
def kill(*args):
    calls.append(put(*args))
    if len(calls) == 60:
        os.kill(os.getpid(), signal.SIGKILL)
torch_dist.PartWriter.put = kill
to_megatron(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def test_kill_9_and_the_same_command_again(pristine, tmp_path, small_files):
    process = subprocess.run([sys.executable, "-c", KILLED, pristine("moe"), tmp_path / "m"], cwd=ROOT)
    assert process.returncode == -signal.SIGKILL
    done = {file.name: file.stat().st_ino for file in (tmp_path / "m.partial").glob("*.distcp")}
    assert done and not (tmp_path / "m").exists()
    out = to_megatron(pristine("moe"), tmp_path / "m")
    assert all((out / name).stat().st_ino == inode for name, inode in done.items())
    assert_bit_equal(tensors(to_hf(out, tmp_path / "back")), tensors(pristine("moe")))


def test_an_interrupted_export_goes_on(pristine, tmp_path, small_files, monkeypatch):
    checkpoint = to_megatron(pristine("moe"), tmp_path / "m")
    with monkeypatch.context() as patch:
        _stop_after(patch, convert.ShardWriter, "put_rows", 60)
        with pytest.raises(Stop):
            to_hf(checkpoint, tmp_path / "back", shard_size=90_000)
    done = {file.name: file.stat().st_ino for file in (tmp_path / "back.partial").glob("*.safetensors")}
    assert done and not list((tmp_path / "back.partial").glob("*.safetensors.partial"))
    back = to_hf(checkpoint, tmp_path / "back", shard_size=90_000)
    assert all((back / name).stat().st_ino == inode for name, inode in done.items())
    assert_bit_equal(tensors(back), tensors(pristine("moe")))
    assert len(json.loads((back / "conversion.json").read_text())["tensors"]) == 69


def test_a_changed_source_is_not_mixed_with_what_is_there(hf, tmp_path, small_files, monkeypatch):
    directory = hf()
    with monkeypatch.context() as patch:
        _stop_after(patch, torch_dist.PartWriter, "put", 60)
        with pytest.raises(Stop):
            to_megatron(directory, tmp_path / "m")
    (directory / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="m.partial: left by an interrupted conversion .* --force"):
        to_megatron(directory, tmp_path / "m")
    to_megatron(directory, tmp_path / "m", force=True)


def test_nothing_is_overwritten_without_force(pristine, tmp_path):
    out = to_megatron(pristine("dense"), tmp_path / "m")
    with pytest.raises(CheckpointError, match="m: exists already. Give --force"):
        to_megatron(pristine("moe"), out)
    to_megatron(pristine("moe"), out, force=True)
    assert open_checkpoint(out).arch.is_moe
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m"]


def test_force_does_not_remove_what_is_no_checkpoint(pristine, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.tex").touch()
    with pytest.raises(CheckpointError, match="home: is not a checkpoint"):
        to_megatron(pristine("dense"), tmp_path / "home", force=True)


def test_two_processes_do_not_write_one_checkpoint(pristine, tmp_path):
    source = open_checkpoint(pristine("dense"))
    first = convert._staging(source, tmp_path / "m", Options(), convert.plan_parts(source, Options()))
    with pytest.raises(CheckpointError, match="another process is writing there"):
        to_megatron(pristine("dense"), tmp_path / "m")
    first.close()
    to_megatron(pristine("dense"), tmp_path / "m")


def test_a_full_disk_is_foreseen(pristine, tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 10, 100))
    with pytest.raises(CheckpointError, match="needs 0.0 GB, the disk has 0.0 GB free"):
        to_megatron(pristine("dense"), tmp_path / "m")


def test_a_disk_that_fills_up_leaves_nothing_published(pristine, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoint = to_megatron(pristine("dense"), tmp_path / "m")
    with monkeypatch.context() as patch:
        patch.setattr(torch_dist, "write_exactly", full)
        with pytest.raises(CheckpointError, match="disk full. Make room and give the same command again"):
            to_megatron(pristine("dense"), tmp_path / "n")
        patch.setattr("checkpoint_tools.hf_files.write_exactly", full)
        with pytest.raises(CheckpointError, match="disk full"):
            to_hf(checkpoint, tmp_path / "back")
    assert not (tmp_path / "n").exists() and not (tmp_path / "back").exists()
    assert_bit_equal(tensors(to_hf(checkpoint, tmp_path / "back")), tensors(pristine("dense")))


def test_rows_that_are_not_written_are_an_error(pristine, tmp_path, monkeypatch):
    original = torch_dist.PartWriter.put

    def forgetful(self, row, rows):
        if self.chunks[-1].key != "decoder.final_layernorm.weight":
            original(self, row, rows)

    with monkeypatch.context() as patch:
        patch.setattr(torch_dist.PartWriter, "put", forgetful)
        with pytest.raises(CheckpointError, match="decoder.final_layernorm.weight lacks 64 elements"):
            to_megatron(pristine("dense"), tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_a_weight_that_is_not_written_is_an_error(pristine, tmp_path, monkeypatch):
    original = convert.plan_parts

    def forgetful(source, options):
        first, *others = original(source, options)
        return [convert.OutputFile(first.name, first.items[1:], first.nbytes), *others]

    monkeypatch.setattr(convert, "plan_parts", forgetful)
    with pytest.raises(CheckpointError, match=r"\d+ of \d+ elements were written"):
        to_megatron(pristine("dense"), tmp_path / "m")
    assert not (tmp_path / "m").exists()


def test_what_cannot_be_read_again_is_not_published(pristine, tmp_path, monkeypatch):
    """verl#6842, #7193."""
    checkpoint = to_megatron(pristine("dense"), tmp_path / "m")
    monkeypatch.setattr(convert, "write_index", lambda *args: None)
    with pytest.raises(CheckpointError, match="neither an HF model"):
        to_hf(checkpoint, tmp_path / "back", shard_size=90_000)
    assert not (tmp_path / "back").exists()


def test_one_changed_bit_is_found(pristine, hf, tmp_path):
    directory = hf("dense")
    name = "model.layers.1.self_attn.k_proj.weight"
    key = tensors(directory)[name]
    key.view(torch.int32)[7, 3] ^= 1
    edit_weights(directory, **{name: key})
    checkpoint = to_megatron(directory, tmp_path / "m")
    result = compare(open_checkpoint(pristine("dense")), open_checkpoint(checkpoint))
    assert [difference.name for difference in result.differences] == [name]
    assert result.differences[0].reason.startswith("1 of 2048 elements, first at [7, 3]:")
    assert not compare(open_checkpoint(directory), open_checkpoint(checkpoint)).differences


def test_negative_zero_and_nan_are_kept_and_compared_bit_for_bit(hf, tmp_path):
    directory = hf("dense")
    odd = torch.full((64,), -0.0)
    odd[1] = float("nan")
    edit_weights(directory, **{"model.norm.weight": odd})
    checkpoint = to_megatron(directory, tmp_path / "m")
    source = open_checkpoint(directory)
    assert not compare(source, open_checkpoint(checkpoint)).differences
    edit_weights(directory, **{"model.norm.weight": odd.abs()})
    assert compare(open_checkpoint(directory), open_checkpoint(checkpoint)).differences


def test_the_optimizer_of_a_training_checkpoint_is_left_out(pristine, tmp_path):
    """A trainer's checkpoint has more than the model."""
    reader = TorchDistReader(to_megatron(pristine("moe"), tmp_path / "m"))
    state = {key: _whole(reader, key) for key in reader.tensors}
    state["optimizer.state.exp_avg.decoder.final_layernorm.weight"] = torch.zeros(64)
    dcp.save(state, checkpoint_id=tmp_path / "trained", no_dist=True)
    source = open_checkpoint(tmp_path / "trained", pristine("moe"))
    megatron_to_hf(source, tmp_path / "back", Options(), Quiet())
    assert_bit_equal(tensors(tmp_path / "back"), tensors(pristine("moe")))


def _whole(reader, key):
    parts = [reader.read(*place) for place in _places(reader, key)]
    return torch.stack(parts).view(reader.tensors[key][1])
