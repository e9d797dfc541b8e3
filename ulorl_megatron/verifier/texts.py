"""From token ids to the texts that are judged."""

from typing import List, Protocol, Tuple

from ulorl_megatron.verifier.answer import THINKING


class Decoder(Protocol):
    def decode(self, ids: List[int], *, skip_special_tokens: bool) -> str:
        """As a Hugging Face tokenizer's."""


def judged_texts(tokenizer: Decoder, prompt: List[int], response: List[int]) -> Tuple[str, str]:
    """Question and response. The question is the prompt as the policy got it, the chat template's words included.

    Where these open the thinking, the response has only its end; the beginning is put back, so that thinking that
    never ended shows.
    """
    question, text = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, response))
    return question, THINKING + text if question.rstrip().endswith(THINKING) else text
