"""Steps on the question: one thing asked, with a short answer."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Iterable, Iterator, Optional, Tuple

from ulorl_megatron.data.chat import AHEAD, Model, asking, fill, template_file
from ulorl_megatron.data.question import Form, bare, choices, form, open_form, sub_questions
from ulorl_megatron.data.step import Dropped, Outcome, Row, RowStep, Step, Workspace, in_flight, text_of, with_text
from ulorl_megatron.verifier import VerifierFailed

_TEMPLATE = "short_answer.txt"
_LETTER = re.compile(r"\(?([A-H])\)?")
_LONGEST = 64  # characters of a rewrite's answer


@dataclass
class SubQuestions(RowStep):
    """Drops problems that ask several marked questions, (a) and (b), since one answer does not answer them."""

    def outcome(self, row: Row) -> Outcome:
        asked = sub_questions(text_of(row))
        return Dropped("several sub-questions", f"{asked} of them") if asked else row


@dataclass
class QuestionForm(Step):
    """Turns multiple-choice, proof and true-or-false questions into questions with a short answer, or drops them.

    rules: convert multiple choice without a model where the question stands by itself and the options do not lean on
    one another. model: rewrites the rest; null: the rest is dropped. template: file of its prompt, with {form},
    {question} and {answer}; null: data/templates/short_answer.txt. A rewrite must itself be a short-answer question,
    and keep what the right option says.
    """

    rules: bool = True
    model: Optional[Model] = None
    template: Optional[str] = None

    def files(self) -> Iterable[Path]:
        return [template_file(self.template, _TEMPLATE)] if self.model else []

    def run(self, rows: Iterable[Row], work: Workspace) -> Iterator[Tuple[Row, Outcome]]:
        if self.model is None:
            yield from ((row, self._by_rule(row)) for row in rows)
            return
        template = template_file(self.template, _TEMPLATE).read_text(encoding="utf-8")
        with asking([self.model], work.journal()) as (loop, (chat,)):

            async def outcome(row: Row) -> Outcome:
                ruled = self._by_rule(row)
                if not isinstance(ruled, Dropped):
                    return ruled
                kind = form(text_of(row), row["answer"])
                filled = {"form": kind.value, "question": text_of(row), "answer": row["answer"]}
                try:
                    return rewritten(row, kind, await chat.ask(fill(template, filled)))
                except VerifierFailed as error:
                    return Dropped(f"{kind.value}, and no reply of the model", str(error))

            yield from in_flight(rows, outcome, loop, self.model.concurrency * AHEAD)

    def _by_rule(self, row: Row) -> Outcome:
        question = text_of(row)
        kind = form(question, row["answer"])
        if kind is Form.short:
            return row
        found = choices(question)
        opened = open_form(found, row["answer"]) if self.rules and found else None
        if opened is None:
            return Dropped(kind.value)
        return with_text(row, opened[0]) | {"answer": opened[1], "rewritten": f"{kind.value}, by rule"}


def rewritten(row: Row, kind: Form, reply: str) -> Outcome:
    """What a model's reply makes of a row; Dropped where it is no question with a short answer of its own."""
    prompt, answer, why = (_between(reply, tag) for tag in ("problem", "answer", "impossible"))
    if why:
        return Dropped(f"{kind.value}, not to be rewritten", why)
    if not prompt or not answer:
        return Dropped(f"{kind.value}, and the model's reply has no rewrite", reply[-200:])
    if form(prompt, answer) is not Form.short or len(answer) > _LONGEST:
        return Dropped(f"{kind.value}, and so is the model's rewrite", f"{prompt} -> {answer}")
    found = choices(text_of(row))
    letter = _LETTER.fullmatch(bare(row["answer"]))
    right = found.text(letter[1]) if found and letter else None
    if right is not None and _compact(right) != _compact(answer):
        return Dropped(f"{kind.value}, and the model's rewrite changes the answer", f"{right} -> {answer}")
    return with_text(row, prompt) | {"answer": answer, "rewritten": f"{kind.value}, by model"}


def _between(reply: str, tag: str) -> str:
    """What stands in the last <tag>...</tag>, or "". Not JSON, whose escapes would eat LaTeX's backslashes."""
    before, opened, rest = reply.rpartition(f"<{tag}>")
    text, closed, _ = rest.partition(f"</{tag}>")
    return text.strip() if opened and closed else ""


def _compact(answer: str) -> str:
    return re.sub(r"\s|\\[ ,;!]|\$", "", bare(answer)).replace("\\dfrac", "\\frac").lower()
