"""Steps on the reference answer: short ones out of worked ones, none that is long or a matrix."""

import re
from dataclasses import dataclass
from typing import Optional

from ulorl_megatron.data.question import bare
from ulorl_megatron.data.step import Dropped, Outcome, Row, RowStep
from ulorl_megatron.verifier.answer import extract_answer

_ANSWER_LINE = re.compile(r"\banswer\b(?:\s+is)?\s*:", re.IGNORECASE)
_MATRIX = re.compile(r"\\begin\s*\{(?:[pbvBV]?(?:small)?matrix|array)\}|\\[pbv]?matrix\b|\[\s*\[")


@dataclass
class ShortAnswer(RowStep):
    """Takes the final answer out of a worked reference: what follows ####, or \\boxed, or the line "Answer: ...".

    A reference with none of these is one already. The worked one stays as `solution`, unless the row has one.
    """

    def outcome(self, row: Row) -> Outcome:
        reference = row["answer"]
        short = _final(reference)
        if short is None:
            return row | {"answer": bare(reference)}
        if not bare(short):
            return Dropped("no final answer in the worked reference", reference[-80:])
        return {"solution": reference} | row | {"answer": bare(short)}


@dataclass
class AnswerForm(RowStep):
    """Drops what a rule cannot judge well. max_characters: of the answer. matrices: keep those that are matrices."""

    max_characters: int = 64
    matrices: bool = False

    def outcome(self, row: Row) -> Outcome:
        answer = row["answer"].strip()
        if not answer:
            return Dropped("empty answer")
        if not self.matrices and _MATRIX.search(answer):
            return Dropped("matrix as the answer", answer)
        if len(answer) > self.max_characters:
            return Dropped("answer too long", f"{len(answer)} characters")
        return row


def _final(reference: str) -> Optional[str]:
    """The final answer of a worked reference, "" if it has none; None for a reference that is not worked."""
    if "####" in reference:
        return reference.rpartition("####")[2].strip().replace(",", "")
    if "\\boxed" in reference or _ANSWER_LINE.search(reference):
        return extract_answer(reference) or ""
    return "" if "\n" in reference.strip() else None
