"""`ulorl plan`: exit codes and words, on this machine and for cards that are elsewhere."""

import json

import pytest

from tests.tiny_models import tiny_model
from ulorl_megatron.cli import main
from ulorl_megatron.plan.cards import GIB

LONG = """
run: {dir: runs/x}
model: {path: models/Qwen3-30B-A3B, max_positions: 133126}
data: {train: t.jsonl}
policy:
  transformer_impl: te
  parallel: {context: 8, expert: 8}
  max_tokens_per_rank: 16640
  recompute: full
"""


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(LONG)
    return str(file)


def plan(capsys, *arguments):
    """(exit code, output) of a plan that could be made."""
    code = main(["plan", *arguments])
    captured = capsys.readouterr()
    assert captured.err == ""
    return code, captured.out


def data(capsys, *arguments):
    code, out = plan(capsys, *arguments, "--json")
    return code, json.loads(out)


def test_128k_fits_32_cards_of_80_gb(config, capsys):
    code, out = plan(capsys, config, "--gpu", "h100-80", "--gpus", "32")
    assert code == 0
    for words in (
        "parameters",
        "gradients",
        "optimizer",
        "layer inputs",
        "log-prob head",
        "total",
        "expected",
        "binds",
    ):
        assert words in out
    assert out.splitlines()[-1].startswith("fits: the fullest rank needs ")
    assert "fits: " in out and "does not fit" not in out and "published shape of qwen3-30b-a3b" in out


def test_without_recomputation_it_does_not(config, capsys):
    code, out = plan(capsys, config, "policy.recompute=none", "--gpus", "32")
    assert code == 1
    assert out.splitlines()[-1].startswith("does not fit: the fullest rank needs ") and "activations: experts" in out


def test_the_larger_card_takes_what_the_smaller_cannot(config, capsys):
    for gpu, expected in (("h100-80", 1), ("a100-80", 1), ("h200-141", 0)):
        assert plan(capsys, config, "--gpus", "8", "--gpu", gpu)[0] == expected


def test_the_ranks_are_as_many_as_the_layout_needs(config, capsys):
    assert data(capsys, config)[1]["ranks"] == 8
    assert data(capsys, config, "run.processes=20")[1]["ranks"] == 24


def test_rows_add_up_to_the_total(config, capsys):
    _, found = data(capsys, config, "--gpus", "32", "policy.parallel.pipeline=2")
    assert len(found["stages"]) == 2
    for stage in found["stages"]:
        fixed = sum(stage[name] for name in ("parameters", "gradients", "optimizer", "fragmentation", "runtime"))
        moving = sum(stage["kept"].values()) + max(stage["layer"], stage["head"])
        assert stage["total"] == fixed + moving
    assert found["fits"] == (max(s["total"] for s in found["stages"]) <= found["memory"])


def test_offload_and_replicas_take_the_optimizer_off_the_card(config, capsys):
    def optimizer(*arguments):
        return data(capsys, config, *arguments)[1]["stages"][0]["optimizer"]

    assert optimizer("--gpus", "16") == pytest.approx(optimizer("--gpus", "8") / 2, rel=1e-6)
    assert optimizer("--gpus", "8", "policy.optimizer.offload=true") == pytest.approx(
        optimizer("--gpus", "24"), rel=1e-6
    )


def test_the_imbalance_of_experts_costs_memory(config, capsys):
    even, uneven = (data(capsys, config, "--imbalance", x)[1]["stages"][0]["total"] for x in ("1", "2"))
    assert uneven > even + GIB


def test_search_finds_layouts_that_the_plan_confirms(config, capsys):
    code, found = data(capsys, config, "--gpus", "32", "--search")
    assert code == 0 and len(found["layouts"]) > 100
    speeds = [layout["tokens_per_second"] for layout in found["layouts"]]
    assert speeds == sorted(speeds, reverse=True)
    for layout in (found["layouts"][0], found["layouts"][-1]):
        code, planned = data(capsys, config, "--gpus", "32", *layout["overrides"])
        assert code == 0 and max(s["total"] for s in planned["stages"]) == layout["total"]
        assert planned["throughput"]["tokens_per_second"] == pytest.approx(layout["tokens_per_second"])


def test_search_says_which_settings_to_take(config, capsys):
    code, out = plan(capsys, config, "--gpus", "32", "--search", "--top", "3")
    assert code == 0 and "layouts that fit" in out
    overrides = out.splitlines()[-1].split()
    assert "policy.parallel.tensor" in overrides[0] and plan(capsys, config, "--gpus", "32", *overrides)[0] == 0


def test_search_in_vain(config, capsys):
    code, out = plan(capsys, config, "--gpus", "2", "--search")
    assert code == 1 and "does not fit: no layout of 2 ranks" in out


def test_a_model_that_is_here_on_this_machine(tmp_path, capsys):
    model = tiny_model(tmp_path / "model")
    capsys.readouterr()  # of its writing
    arguments = [f"model.path={model}", "model.dtype=float32", "policy.transformer_impl=local", "--gpu", "cpu"]
    small = ["rollout.global_max_length=1024", "data.max_prompt_length=64", "policy.parallel={expert: 2}"]
    file = tmp_path / "config.yaml"
    file.write_text(LONG.replace(", max_positions: 133126", ""))
    code, out = plan(capsys, str(file), *arguments, *small)
    assert code == 0 and "config.json" in out and "expected" not in out  # nothing is promised of a CPU


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["model.path=nowhere"], "model.path: nowhere holds no config.json"),
        (["--model", "gpt-5"], "--model: gpt-5 is not known"),
        (["policy.parallel.context=5", "--gpus", "8"], "does not divide 8 ranks"),
        (["policy.parallel.expert=3"], "expert = 3 does not divide 128 experts"),
        (["policy.parallel.tensor=8", "policy.parallel.context=1"], "key-value heads"),
        (["model.max_positions=40960"], "rollout.global_max_length"),
        (["policy.recomputed=full"], "did you mean policy.recompute?"),
        (["--gpu", "cpu"], "te runs on a GPU only"),
        (["--gpus", "0"], "--gpus"),
        (["--imbalance", "0.5"], "--imbalance"),
    ],
)
def test_what_cannot_be_planned(config, capsys, arguments, words):
    assert main(["plan", config, *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and words in captured.err and captured.out == ""
