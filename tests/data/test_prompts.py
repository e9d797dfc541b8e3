"""Reading prompt sets, and the order in which prompts are issued."""

import json
from collections import Counter

import pytest

from tests.tiny_models import tiny_tokenizer
from ulorl_megatron.data import PromptSet, encode_prompt
from ulorl_megatron.errors import UserError


@pytest.fixture(scope="module")
def tokenizer():
    return tiny_tokenizer()


@pytest.fixture(scope="module")
def bare_tokenizer():
    bare = tiny_tokenizer()
    bare.chat_template = None
    return bare


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def ten(tmp_path, tokenizer):
    file = write(tmp_path / "ten.jsonl", [{"prompt": f"p{i}", "answer": str(i)} for i in range(10)])
    return PromptSet(file, tokenizer, max_prompt_length=256, seed=0)


def indices(prompts):
    return [p.index for p in prompts]


def test_rows_go_through_the_chat_template(tmp_path, tokenizer):
    messages = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1"}]
    file = write(
        tmp_path / "a.jsonl", [{"prompt": "1+1", "answer": "2"}, {"prompt": messages, "answer": "2"}]
    )
    plain, chat = PromptSet(file, tokenizer, 256, seed=0).first(2)
    assert plain.text == "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n"
    assert chat.text == "<|im_start|>system\nadd<|im_end|>\n" + plain.text
    for prompt, source in ((plain, "1+1"), (chat, messages)):
        assert tokenizer.decode(prompt.tokens) == prompt.text
        assert prompt.tokens == encode_prompt(tokenizer, source)
        assert all(type(token) is int for token in prompt.tokens)


def test_without_a_template_the_text_stays_as_it_is(tmp_path, bare_tokenizer):
    file = write(tmp_path / "a.jsonl", [{"prompt": "1+1", "answer": "2"}])
    (prompt,) = PromptSet(file, bare_tokenizer, 256, seed=0).take(0, 1)
    assert (prompt.index, prompt.text, prompt.answer) == (0, "1+1", "2")
    assert bare_tokenizer.decode(prompt.tokens) == "1+1"
    assert prompt.tokens == encode_prompt(bare_tokenizer, "1+1")


def test_each_epoch_has_every_row_once_in_its_own_order(ten):
    epochs = [indices(ten.take(10 * e, 10)) for e in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert list(range(10)) not in epochs


def test_the_order_depends_on_the_seed(tmp_path, tokenizer, ten):
    file = write(tmp_path / "b.jsonl", [{"prompt": f"p{i}", "answer": str(i)} for i in range(10)])
    assert indices(PromptSet(file, tokenizer, 256, seed=0).take(0, 10)) == indices(ten.take(0, 10))
    assert indices(PromptSet(file, tokenizer, 256, seed=1).take(0, 10)) != indices(ten.take(0, 10))


def test_any_resume_continues_the_unbroken_order(ten):
    """The border of an epoch included: nothing is skipped, repeated or empty (verl#5725)."""
    unbroken = indices(ten.take(0, 45))
    for position in range(36):
        assert indices(ten.take(position, 9)) == unbroken[position : position + 9]
    assert len(ten.take(10, 4)) == 4
    assert Counter(unbroken[:40]) == Counter(dict.fromkeys(range(10), 4))


def test_more_prompts_at_once_than_there_are_rows(ten):
    assert Counter(indices(ten.take(5, 25))) == Counter(indices(ten.take(5, 5)) + list(range(10)) * 2)


def test_first_keeps_the_order_of_the_file(ten):
    assert indices(ten.first(3)) == [0, 1, 2]
    assert len(ten.first(99)) == len(ten) == 10


GOOD = '{"prompt": "1+1", "answer": "2"}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not valid JSON"),
        ("[1]", "a list, where an object"),
        ('{"answer": "2"}', "no 'prompt'; the row has 'answer'"),
        ('{"prompt": "1+1", "anwser": "2"}', "no 'answer'; the row has 'prompt', 'anwser'"),
        ('{"prompt": "1+1", "answer": ""}', "'answer' is empty"),
        ('{"prompt": "1+1", "answer": " "}', "'answer' is empty"),
        ('{"prompt": "1+1", "answer": 2}', "'answer' is a int, not a string"),
        ('{"prompt": "1+1", "answer": null}', "'answer' is a NoneType"),
        ('{"prompt": "", "answer": "2"}', "'prompt' is empty"),
        ('{"prompt": [], "answer": "2"}', "neither a string nor a list of messages"),
        ('{"prompt": [{"role": "user"}], "answer": "2"}', "'role' and a 'content'"),
        (json.dumps({"prompt": "1" * 300, "answer": "2"}), "more than data.max_prompt_length 256"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, tokenizer, line, message):
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{GOOD}\n\n{line}\n{GOOD}\n")
    with pytest.raises(UserError) as error:
        PromptSet(str(file), tokenizer, 256, seed=0)
    assert str(error.value).startswith(f"{file}:3: ")
    assert message in str(error.value)


def test_the_limit_is_of_tokens_after_the_template(tmp_path, tokenizer):
    file = write(tmp_path / "a.jsonl", [{"prompt": "1+1", "answer": "2"}])
    length = len(encode_prompt(tokenizer, "1+1"))
    assert len(PromptSet(file, tokenizer, length, seed=0)) == 1
    with pytest.raises(UserError, match=f"{length} tokens"):
        PromptSet(file, tokenizer, length - 1, seed=0)


def test_messages_need_a_template(tmp_path, bare_tokenizer):
    file = write(tmp_path / "a.jsonl", [{"prompt": [{"role": "user", "content": "1"}], "answer": "2"}])
    with pytest.raises(UserError, match=r"a\.jsonl:1: .*no chat template"):
        PromptSet(file, bare_tokenizer, 256, seed=0)


@pytest.mark.parametrize("content", [None, b"", b"\n\n", b"\xff\xfe{}"])
def test_no_file_no_rows_no_text(tmp_path, tokenizer, content):
    file = tmp_path / "rows.jsonl"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError, match=r"rows\.jsonl"):
        PromptSet(str(file), tokenizer, 256, seed=0)


def test_line_separators_inside_strings_do_not_end_a_row(tmp_path, tokenizer):
    """JSON allows U+2028 unescaped; only a newline ends a line."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a\u2028b", "answer": "2"}\n', encoding="utf-8")
    (prompt,) = PromptSet(str(file), tokenizer, 256, seed=0).first(1)
    assert "a\u2028b" in prompt.text
