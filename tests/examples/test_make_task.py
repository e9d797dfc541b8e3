"""The quickstart's task: what is written fits together, and can be learned by one who reads it."""

import json
import runpy
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig, AutoTokenizer

from ulorl_megatron.data import PromptSet
from ulorl_megatron.verifier.answer import extract_answer
from ulorl_megatron.verifier.mathematics import judge

SCRIPT = Path(__file__).parents[2] / "examples" / "quickstart_cpu" / "make_task.py"
SEGMENT, LONGEST = 32, 128  # of the quickstart's config.yaml


def make(out, *arguments):
    """Runs the script in this process; a new one would spend most of its time on imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(SCRIPT), str(out), *arguments])
        runpy.run_path(str(SCRIPT), run_name="__main__")


def rows(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    out = tmp_path_factory.mktemp("task") / "out"
    make(out)
    return out


@pytest.fixture(scope="module")
def tokenizer(task):
    return AutoTokenizer.from_pretrained(task / "model")


def test_worked_answers_are_right_by_the_verifier(task):
    for row in rows(task / "warmstart.jsonl")[:200]:
        assert row["answer"] == str(sum(map(int, row["prompt"].split("+"))))
        given = extract_answer(row["response"])
        assert judge(given, row["answer"]) == 1.0
        assert judge("1" + given, row["answer"]) == 0.0


def test_heldout_is_disjoint_and_has_no_row_twice(task):
    heldout = [row["prompt"] for row in rows(task / "heldout.jsonl")]
    assert len(set(heldout)) == len(heldout) >= 64
    for name in ("train", "warmstart"):
        assert not {row["prompt"] for row in rows(task / f"{name}.jsonl")} & set(heldout)


def test_lengths_have_a_long_tail_over_several_segments(task, tokenizer):
    texts = [row["response"] for row in rows(task / "warmstart.jsonl")]
    lengths = sorted(len(ids) + 1 for ids in tokenizer(texts)["input_ids"])  # and EOS
    assert 20 <= lengths[len(lengths) // 2] <= 40
    assert 2 * SEGMENT < lengths[-1] <= LONGEST
    assert sum(n > SEGMENT for n in lengths) / len(lengths) > 0.3


def test_tokenizer_survives_saving(task, tokenizer):
    text = "03+8=11;11+5=16;\\boxed{16}"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) == 20  # a character each, and one for the box
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert tokenizer.decode(ids) == text


def test_prompts_go_through_the_chat_template(task, tokenizer):
    (prompt,) = PromptSet(str(task / "train.jsonl"), tokenizer, max_prompt_length=64, seed=0).first(1)
    assert prompt.text == f"<user>{rows(task / 'train.jsonl')[0]['prompt']}<assistant>"
    assert tokenizer.decode(prompt.tokens) == prompt.text


def test_the_model_is_a_small_qwen3_moe_in_float32(task, tokenizer):
    config = AutoConfig.from_pretrained(task / "model")
    assert config.model_type == "qwen3_moe"
    assert (config.num_experts, config.num_experts_per_tok) == (8, 2)
    assert config.num_key_value_heads < config.num_attention_heads
    assert config.vocab_size == len(tokenizer) < 64
    assert config.eos_token_id == tokenizer.eos_token_id
    weights = load_file(task / "model" / "model.safetensors")
    assert {str(tensor.dtype) for tensor in weights.values()} == {"torch.float32"}
    assert "model.layers.0.self_attn.q_norm.weight" in weights


def test_the_seed_decides_everything(task, tmp_path):
    same, other = tmp_path / "same", tmp_path / "other"
    make(same, "--seed", "0")
    make(other, "--seed", "1")
    for name in ("train.jsonl", "heldout.jsonl", "warmstart.jsonl", "model/model.safetensors"):
        assert (same / name).read_bytes() == (task / name).read_bytes()
        assert (other / name).read_bytes() != (task / name).read_bytes()


def test_a_task_that_is_there_is_not_overwritten(task):
    before = (task / "train.jsonl").read_bytes()
    with pytest.raises(SystemExit, match="exists already"):
        make(task, "--seed", "5")
    assert (task / "train.jsonl").read_bytes() == before
