"""Publishing HF folders: complete or absent, and loadable by transformers. (The server loads them in test_train.py.)"""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.tiny_models import tiny_model
from ulorl_megatron.config.schema import ModelConfig
from ulorl_megatron.weight_sync import disk, publish_weights


class TwoRanks:
    """Stands for rank 1 of two; rank 0's shard is given."""

    rank, world_size = 1, 2

    def __init__(self, other):
        self.other = other

    def only_first(self, work):
        return work()

    def gather(self, item):
        return [self.other, item]


class OneRank:
    rank, world_size = 0, 1

    def only_first(self, work):
        return work()

    def gather(self, item):
        return [item]


class FilePolicy:
    """Hands out the tensors of a safetensors file, as a policy would."""

    def __init__(self, path):
        self.tensors = load_file(path)

    def hf_tensors(self):
        return iter(self.tensors.items())


@pytest.fixture
def model(tmp_path):
    return tiny_model(tmp_path / "model", "dense")


def test_published_folder_is_the_model(model, tmp_path):
    policy = FilePolicy(model / "model.safetensors")
    folder = publish_weights(policy, OneRank(), ModelConfig(str(model)), tmp_path / "weights", 7, keep=2)
    assert folder.name == "step-000007"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == policy.tensors.keys()
    assert index["metadata"]["total_size"] == sum(t.numel() * 4 for t in policy.tensors.values())
    ours, theirs = (AutoModelForCausalLM.from_pretrained(p, dtype=torch.float32).state_dict() for p in (folder, model))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert (folder / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


def test_old_versions_go_and_leftovers_of_a_kill_do_not_matter(model, tmp_path):
    policy, weights = FilePolicy(model / "model.safetensors"), tmp_path / "weights"
    (weights / ".partial-000002").mkdir(parents=True)
    (weights / ".partial-000002" / "junk.safetensors").write_text("half")
    (weights / "step-000002").mkdir()  # published before the kill; this run makes the step again
    for version in (1, 2, 3):
        publish_weights(policy, OneRank(), ModelConfig(str(model)), weights, version, keep=2)
    assert sorted(p.name for p in weights.iterdir()) == ["step-000002", "step-000003"]
    assert not (weights / "step-000002" / "junk.safetensors").exists()


def test_a_run_taken_back_keeps_what_it_just_published(model, tmp_path):
    """Killed before a checkpoint was complete, a run publishes an earlier version than the folders that are there."""
    policy, weights = FilePolicy(model / "model.safetensors"), tmp_path / "weights"
    for version in (1, 2, 0):
        folder = publish_weights(policy, OneRank(), ModelConfig(str(model)), weights, version, keep=2)
    assert [p.name for p in weights.iterdir()] == [folder.name] == ["step-000000"]


def test_a_shard_that_does_not_hold_what_its_rank_said_is_not_published(model, tmp_path, monkeypatch):  # verl#6842
    policy, weights = FilePolicy(model / "model.safetensors"), tmp_path / "weights"
    save_file = disk.save_file

    def forgetful(tensors, path, metadata):
        save_file(dict(list(tensors.items())[1:]), path, metadata=metadata)

    monkeypatch.setattr(disk, "save_file", forgetful)
    with pytest.raises(RuntimeError, match="missing"):
        publish_weights(policy, OneRank(), ModelConfig(str(model)), weights, 1, keep=2)
    assert not (weights / "step-000001").exists()


def test_a_tensor_that_two_ranks_wrote_is_not_published(model, tmp_path):
    policy, weights = FilePolicy(model / "model.safetensors"), tmp_path / "weights"
    both = ("model-00002-of-00002.safetensors", {"model.norm.weight": 256})
    with pytest.raises(RuntimeError, match="written twice"):
        publish_weights(policy, TwoRanks(both), ModelConfig(str(model)), weights, 1, keep=2)
