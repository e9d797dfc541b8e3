"""Steps on the prompt as the policy gets it: its length in tokens, and an instruction at its end."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Iterable

from omegaconf import MISSING
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ulorl_megatron.data.prompts import encode_prompt
from ulorl_megatron.data.step import Dropped, Outcome, Row, RowStep, text_of, with_text
from ulorl_megatron.errors import UserError


@dataclass
class PromptLength(RowStep):
    """Drops prompts of more than `max_tokens` tokens after the chat template of `model`'s tokenizer.

    model: a Hugging Face folder.
    """

    model: str = MISSING
    max_tokens: int = 2048

    def check(self) -> None:
        if not Path(self.model).is_dir():
            raise UserError(f"prompt_length.model: no folder {self.model}")

    def files(self) -> Iterable[Path]:
        return sorted(path for path in Path(self.model).glob("*token*") if path.is_file())

    def outcome(self, row: Row) -> Outcome:
        length = len(encode_prompt(self._tokenizer, row["prompt"]))
        if length > self.max_tokens:
            return Dropped("prompt too long", f"{length} tokens")
        return row

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return AutoTokenizer.from_pretrained(self.model)


@dataclass
class Instruction(RowStep):
    """Puts `text` behind the question, as "Put your final answer in \\boxed{}."; not where it stands there already."""

    text: str = MISSING
    separator: str = "\n\n"

    def outcome(self, row: Row) -> Outcome:
        question = text_of(row)
        return row if question.endswith(self.text) else with_text(row, question + self.separator + self.text)
