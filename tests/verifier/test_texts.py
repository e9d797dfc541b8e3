"""The texts that are judged, from token ids."""

import pytest

from tests.tiny_models import tiny_tokenizer
from ulorl_megatron.verifier.answer import extract_answer
from ulorl_megatron.verifier.texts import judged_texts


@pytest.mark.parametrize(
    ("opening", "response", "answer"),
    [
        ("", r"\boxed{1}", "1"),
        ("<think>\n", r"\boxed{1}", None),  # it only thought, and never ended that
        ("<think>\n", r"\boxed{1}</think>\boxed{2}", "2"),
        ("<think>\n\n</think>\n\n", r"\boxed{1}", "1"),  # a template that turns thinking off
    ],
)
def test_thinking_that_the_template_opens(opening, response, answer):
    tokenizer = tiny_tokenizer()
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "1 + 1?"}], tokenize=False) + opening
    question, text = judged_texts(tokenizer, tokenizer.encode(prompt), tokenizer.encode(response + "<|eos|>"))
    assert "1 + 1?" in question and "<|" not in question + text
    assert extract_answer(text) == answer
