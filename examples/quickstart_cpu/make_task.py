"""A task worth learning on a CPU: sums of 2 to 12 numbers, and a tiny untrained Qwen3-MoE to learn them.

    python examples/quickstart_cpu/make_task.py OUT_DIR [--seed N]

A prompt is `3+8+5`. Its worked answer keeps a running total of two digits, `03+8=11;11+5=16;\\boxed{16}`:
every token follows from a few before it. The answers have a long tail of lengths: median 29 tokens, up to 93.
"""

import argparse
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Dict, List, Set

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils.logging import disable_progress_bar

SPECIAL = ["<pad>", "<eos>", "<user>", "<assistant>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

# Share of each number of terms: falling slowly, so that few answers are long but nearly all steps see one.
TERMS = {2: 16, 3: 19, 4: 17, 5: 13, 6: 10, 7: 8, 8: 6, 9: 4, 10: 3, 11: 2, 12: 2}
LARGEST = 8  # 12 terms of it make 96, so that a running total never needs a third digit
ROWS = {"heldout": 256, "train": 4096, "warmstart": 8192}


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, but `\\boxed{` is one of its own; a character it does not know is an error."""
    vocab = {token: i for i, token in enumerate([*SPECIAL, *"0123456789+=; }"])}
    characters = Tokenizer(models.WordLevel(vocab))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    characters.decoder = decoders.Fuse()
    characters.add_tokens([AddedToken("\\boxed{", normalized=False)])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        eos_token="<eos>",
        additional_special_tokens=["<user>", "<assistant>"],
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def write_model(out: Path, seed: int) -> None:
    """The HF folder: config.json, model.safetensors (float32, random by `seed`), tokenizer."""
    text = tokenizer()
    config = Qwen3MoeConfig(
        vocab_size=len(text),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        initializer_range=0.06,  # HF's 0.02 is for wide models; a narrow one learns slowly from it
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3MoeForCausalLM(config)
    model.to(torch.float32).save_pretrained(out)
    text.save_pretrained(out)


def work(terms: List[int]) -> Dict[str, str]:
    """{"prompt", "response", "answer"} of one sum."""
    total, steps = terms[0], []
    for term in terms[1:]:
        steps.append(f"{total:02d}+{term}={total + term:02d};")
        total += term
    return {
        "prompt": "+".join(map(str, terms)),
        "response": "".join(steps) + f"\\boxed{{{total}}}",
        "answer": str(total),
    }


def sums(count: int, draw: random.Random, avoid: Set[str], unique: bool) -> List[Dict[str, str]]:
    """`count` sums with none of the prompts of `avoid`. unique: none comes twice."""
    rows: List[Dict[str, str]] = []
    seen = set(avoid)
    while len(rows) < count:
        (length,) = draw.choices(list(TERMS), list(TERMS.values()))
        row = work([draw.randint(1, LARGEST) for _ in range(length)])
        if row["prompt"] not in seen:
            rows.append(row)
            if unique:
                seen.add(row["prompt"])
    return rows


def write_rows(file: Path, rows: List[Dict[str, str]], keys: List[str]) -> None:
    file.write_text("".join(json.dumps({key: row[key] for key in keys}) + "\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="folder to write model/ and the *.jsonl files into")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if (args.out / "model").exists():
        sys.exit(f"error: {args.out}/model exists already; remove {args.out}, or name another folder")
    disable_progress_bar()
    args.out.mkdir(parents=True, exist_ok=True)
    draw = random.Random(args.seed)
    heldout = sums(ROWS["heldout"], draw, avoid=set(), unique=True)
    kept_back = {row["prompt"] for row in heldout}
    write_rows(args.out / "heldout.jsonl", heldout, ["prompt", "answer"])
    train = sums(ROWS["train"], draw, kept_back, unique=False)
    write_rows(args.out / "train.jsonl", train, ["prompt", "answer"])
    warm = sums(ROWS["warmstart"], draw, kept_back, unique=False)
    write_rows(args.out / "warmstart.jsonl", warm, ["prompt", "response", "answer"])

    unfinished = args.out / ".model"
    shutil.rmtree(unfinished, ignore_errors=True)
    write_model(unfinished, args.seed)
    unfinished.rename(args.out / "model")  # last, so that model/ is there only if all is
    print(f"{args.out}: model/, {', '.join(f'{name}.jsonl ({rows})' for name, rows in ROWS.items())}")


if __name__ == "__main__":
    main()
