import json
import shutil

import pytest

from checkpoint_tools.cli import main
from checkpoint_tools.hf_files import write_index
from checkpoint_tools.name_map import weights
from checkpoint_tools.report import ConfigSource
from tests.checkpoint_tools.support import QWEN3_30B_A3B, to_megatron


def run(capsys, *arguments) -> tuple[int, str, str]:
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def qwen3_30b(tmp_path):
    """The real model's config and nothing else."""
    directory = tmp_path / "Qwen3-30B-A3B"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(QWEN3_30B_A3B))
    return directory


def test_the_plan_of_the_real_qwen3_30b_a3b(qwen3_30b, tmp_path, capsys):
    code, out, _ = run(capsys, "hf-to-megatron", qwen3_30b, tmp_path / "out", "--dry-run")
    assert code == 0
    assert "HF           18,867 tensors" in out
    assert "elements     30,532,122,624" in out
    assert "output       61.06 GB in" in out
    assert "6,144  gate_up  etp dim 0   model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight" in out
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()
    _, out, _ = run(capsys, "hf-to-megatron", qwen3_30b, tmp_path / "out", "--dry-run", "--dtype", "float32")
    assert "output       122.13 GB in" in out


def test_the_plan_checks_the_index_where_there_is_one(qwen3_30b, tmp_path, capsys):
    names = [name for weight in weights(ConfigSource(qwen3_30b).arch) for name in weight.hf]
    write_index(qwen3_30b, dict.fromkeys(names, "model-00001-of-00001.safetensors"), 1)
    assert run(capsys, "hf-to-megatron", qwen3_30b, tmp_path / "out", "--dry-run")[0] == 0
    write_index(qwen3_30b, dict.fromkeys(names[:-1], "model-00001-of-00001.safetensors"), 1)
    code, _, err = run(capsys, "hf-to-megatron", qwen3_30b, tmp_path / "out", "--dry-run")
    assert code == 2 and "index.json: 1 key(s) are missing, first lm_head.weight" in err
    write_index(qwen3_30b, dict.fromkeys([*names, "extra"], "model-00001-of-00001.safetensors"), 1)
    code, _, err = run(capsys, "hf-to-megatron", qwen3_30b, tmp_path / "out", "--dry-run")
    assert code == 2 and "1 unexpected key(s), first extra" in err


def test_there_and_back_and_verified(pristine, tmp_path, capsys):
    megatron, back = tmp_path / "m", tmp_path / "back"
    code, out, _ = run(capsys, "hf-to-megatron", pristine("moe"), megatron)
    assert code == 0 and "49 parameters, 159,104 elements; see conversion.json" in out
    assert run(capsys, "megatron-to-hf", megatron, back, "--shard-size", "200KB", "--workers", "3")[0] == 0
    assert len(list(back.glob("model-*"))) == 4
    for pair in ((pristine("moe"), megatron), (megatron, back), (back, pristine("moe"))):
        code, out, _ = run(capsys, "verify", *pair)
        assert (code, out) == (0, "bit-equal: 69 tensors, 159,104 elements\n")


def test_verify_says_where_they_differ(pristine, tmp_path, capsys):
    run(capsys, "hf-to-megatron", pristine("dense"), tmp_path / "bf16", "--dtype", "bfloat16")
    code, out, _ = run(capsys, "verify", pristine("dense"), tmp_path / "bf16")
    assert code == 1
    assert out.startswith("different: 25 of 25 tensors\n")
    assert "  model.embed_tokens.weight: dtype torch.float32 against torch.bfloat16" in out and "  and 5 more" in out
    code, _, err = run(capsys, "verify", pristine("dense"), pristine("moe"))
    assert code == 2 and "are different models" in err


def test_inspect_tells_what_a_checkpoint_is(pristine, tmp_path, capsys):
    _, out, _ = run(capsys, "inspect", pristine("tied"))
    assert "kind         HF safetensors" in out and "tied embeddings" in out
    to_megatron(pristine("moe"), tmp_path / "m")
    _, out, _ = run(capsys, "inspect", tmp_path / "m", "--tensors")
    assert "kind         torch_dist (Megatron-Core)" in out
    assert "map          complete, every key mapped" in out
    assert "iteration    0" in out
    assert "parameters   159,104" in out
    assert "dtypes       float32 (12 tensors)" in out
    assert "decoder.layers.mlp.router.weight  float32  [2, 8, 64]" in out
    shutil.rmtree(tmp_path / "m" / "hf")
    code, out, _ = run(capsys, "inspect", tmp_path / "m")
    assert code == 0 and "parameters   159,104" in out and "--hf-config" in out
    assert "complete" in run(capsys, "inspect", tmp_path / "m", "--hf-config", pristine("moe"))[1]


def test_errors_are_one_line_and_code_2(pristine, tmp_path, capsys):
    megatron = to_megatron(pristine("dense"), tmp_path / "m")
    for arguments, said in (
        (("hf-to-megatron", tmp_path / "none", tmp_path / "o"), "none: no such directory"),
        (("hf-to-megatron", megatron, tmp_path / "o"), "is of the other kind; use megatron-to-hf"),
        (("megatron-to-hf", pristine("dense"), tmp_path / "o"), "is of the other kind; use hf-to-megatron"),
        (("hf-to-megatron", pristine("dense"), megatron), "exists already. Give --force"),
        (("inspect", tmp_path), "neither"),
    ):
        code, out, err = run(capsys, *arguments)
        assert code == 2 and out == "" and err.startswith("error: ") and said in err
        assert err.count("\n") == 1
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize(
    "arguments", [("--workers", "0"), ("--shard-size", "5XB"), ("--shard-size", "0GB"), ("--dtype", "int8")]
)
def test_senseless_options_are_refused(arguments, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["megatron-to-hf", str(tmp_path), str(tmp_path / "o"), *arguments])
    assert arguments[0] in capsys.readouterr().err


def test_an_interruption_says_how_to_go_on(pristine, tmp_path, capsys, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("checkpoint_tools.torch_dist.PartWriter.put", interrupt)
    code, _, err = run(capsys, "hf-to-megatron", pristine("dense"), tmp_path / "m")
    assert code == 130 and "goes on when the same command is given again" in err
