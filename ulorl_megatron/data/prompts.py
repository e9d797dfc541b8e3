"""Prompt sets: JSONL or Parquet files of problems, checked when read and issued in an order that can be resumed."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, List, Optional, Tuple, Union

import numpy as np

from ulorl_megatron.data.files import read_rows
from ulorl_megatron.errors import UserError

if TYPE_CHECKING:  # for `ulorl --help`, which need not wait for it
    from transformers import PreTrainedTokenizerBase

Messages = List[dict]


@dataclass(frozen=True)
class Prompt:
    """index: row of the file, from 0. tokens: ids after the chat template. text: what they say.

    answer: the reference answer, as the verifier gets it.
    """

    index: int
    tokens: List[int]
    answer: str
    text: str


class PromptSet:
    """The rows of a JSONL or Parquet file, {"prompt": str | messages, "answer": str} each.

    max_prompt_length: tokens a prompt may have after the chat template. seed: of the order of every epoch.
    Raises UserError naming file and line for what is not such a row, or too long; no row is left out.
    """

    def __init__(self, path: str, tokenizer: "PreTrainedTokenizerBase", max_prompt_length: int, seed: int):
        self._path = Path(path)
        self._seed = seed
        lines, texts, self._answers = _read(self._path, tokenizer)
        encoded = tokenizer(texts, add_special_tokens=tokenizer.chat_template is None)["input_ids"]
        for line, ids in zip(lines, encoded, strict=True):
            if not ids:
                raise UserError(f"{path}:{line}: the prompt has no tokens")
            if len(ids) > max_prompt_length:
                raise UserError(
                    f"{path}:{line}: the prompt has {len(ids)} tokens after the chat template, more than "
                    f"data.max_prompt_length {max_prompt_length}; raise that, or take the row out"
                )
        self._texts = texts
        # Arrays: lists of ints take ten times the memory, which counts with a hundred thousand long prompts.
        self._tokens = [np.array(ids, dtype=np.int32) for ids in encoded]
        self._epoch: Tuple[int, List[int]] = (-1, [])

    def __len__(self) -> int:
        return len(self._answers)

    def take(self, position: int, n: int) -> List[Prompt]:
        """The n prompts after the first `position` ones ever issued, over as many epochs as that takes.

        Every epoch has each row once, in its own order. Depends on nothing but file, seed and arguments:
        to resume is to ask with the position reached, the end of an epoch included (verl#5725).
        """
        prompts = []
        for i in range(position, position + n):
            epoch, offset = divmod(i, len(self))
            prompts.append(self._prompt(self._order(epoch)[offset]))
        return prompts

    def first(self, n: int) -> List[Prompt]:
        """The first n rows, in the order of the file (for evaluation)."""
        return [self._prompt(row) for row in range(min(n, len(self)))]

    def _prompt(self, row: int) -> Prompt:
        return Prompt(row, self._tokens[row].tolist(), self._answers[row], self._texts[row])

    def _order(self, epoch: int) -> List[int]:
        if self._epoch[0] != epoch:
            order = list(range(len(self)))
            random.Random(f"{self._seed}-{epoch}").shuffle(order)
            self._epoch = (epoch, order)
        return self._epoch[1]


def encode_prompt(tokenizer: "PreTrainedTokenizerBase", prompt: Union[str, Messages]) -> List[int]:
    """Ids of one prompt, as PromptSet makes them."""
    text = _text(tokenizer, prompt)
    return tokenizer.encode(text, add_special_tokens=tokenizer.chat_template is None)


def _text(tokenizer: "PreTrainedTokenizerBase", prompt: Union[str, Messages]) -> str:
    """Through the chat template, a string as one user message; without a template a string stays as it is."""
    if tokenizer.chat_template is None:
        return prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


def _read(path: Path, tokenizer: "PreTrainedTokenizerBase") -> Tuple[List[int], List[str], List[str]]:
    """Line numbers (rows', in Parquet), prompt texts and answers of the rows."""
    lines, texts, answers = [], [], []
    for number, row in read_rows(path):
        fault = _fault(row, tokenizer)
        if fault:
            raise UserError(f"{path}:{number}: {fault}")
        lines.append(number)
        texts.append(_text(tokenizer, row["prompt"]))
        answers.append(row["answer"])
    if not lines:
        raise UserError(f'{path} holds no rows; give one {{"prompt": ..., "answer": ...}} a line')
    return lines, texts, answers


def _fault(row: Any, tokenizer: "PreTrainedTokenizerBase") -> Optional[str]:
    """What is wrong with a row, or None."""
    if not isinstance(row, dict):
        return f"a {type(row).__name__}, where an object with prompt and answer is needed"
    for key in ("prompt", "answer"):
        if key not in row:
            return f"no {key!r}; the row has {', '.join(map(repr, row)) or 'nothing'}"
    prompt, answer = row["prompt"], row["answer"]
    if not isinstance(answer, str):
        return f"'answer' is a {type(answer).__name__}, not a string; write it in quotes"
    if not answer.strip():
        return "'answer' is empty"
    if isinstance(prompt, str):
        return None if prompt.strip() else "'prompt' is empty"
    if not isinstance(prompt, list) or not prompt:
        return "'prompt' is neither a string nor a list of messages"
    for message in prompt:
        if not isinstance(message, dict) or not all(
            isinstance(message.get(key), str) for key in ("role", "content")
        ):
            return "'prompt' has a message without a 'role' and a 'content' that are strings"
    if tokenizer.chat_template is None:
        return "'prompt' is a list of messages, but the tokenizer of model.path has no chat template"
    return None
