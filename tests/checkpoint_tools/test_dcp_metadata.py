"""Reading `.metadata`: what torch writes, and nothing else."""

import pickle
import subprocess
import sys

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from checkpoint_tools.dcp_metadata import Metadata, Place, StoredTensor, read_metadata, write_metadata
from checkpoint_tools.errors import CheckpointError

METADATA = Metadata(
    {"a.weight": StoredTensor(torch.bfloat16, (4, 3), [((0, 0), (2, 3)), ((2, 0), (2, 3))])},
    {
        ("a.weight", (0, 0)): Place("__0_0.distcp", 0, 100),
        ("a.weight", (2, 0)): Place("__0_1.distcp", 64, 100),
        ("common", None): Place("__objects_0.distcp", 0, 7),
    },
)


def test_written_and_read_it_is_the_same(tmp_path):
    write_metadata(tmp_path / ".metadata", METADATA)
    assert read_metadata(tmp_path / ".metadata") == METADATA


def test_it_says_what_torch_says(tmp_path):
    state = {"w": torch.arange(6.0).view(2, 3), "step": 5, "half": torch.zeros(4, dtype=torch.float16)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    metadata = read_metadata(tmp_path / ".metadata")
    assert {k: (t.dtype, t.size) for k, t in metadata.tensors.items()} == {
        "w": (torch.float32, (2, 3)),
        "half": (torch.float16, (4,)),
    }
    theirs = dcp.FileSystemReader(tmp_path).read_metadata().storage_data
    assert metadata.places == {
        (i.fqn, None if i.offset is None else tuple(i.offset)): Place(p.relative_path, p.offset, p.length)
        for i, p in theirs.items()
    }


class _Evil:
    def __reduce__(self):
        return print, ("this was run",)


def test_nothing_in_it_is_run(tmp_path, capsys):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Evil()))
    with pytest.raises(CheckpointError, match="cannot be read .it names builtins.print"):
        read_metadata(tmp_path / ".metadata")
    assert "this was run" not in capsys.readouterr().out


@given(st.integers(0, 10**6), st.binary(min_size=1, max_size=4))
def test_damage_is_an_error_or_no_difference_in_kind(tmp_path_factory, place, noise):
    path = tmp_path_factory.getbasetemp() / "damaged.metadata"
    write_metadata(path, METADATA)
    content = bytearray(path.read_bytes())
    place %= len(content)
    content[place : place + len(noise)] = noise
    path.write_bytes(content)
    try:
        assert isinstance(read_metadata(path), Metadata)
    except CheckpointError as error:
        assert "cannot be read" in str(error)


def test_the_command_does_not_load_what_only_a_trainer_needs():
    code = "import sys, checkpoint_tools.cli; sys.exit('torch.distributed.checkpoint' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
