"""The step that removes references which several models contradict."""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterable, Iterator, List, Optional, Tuple

from ulorl_megatron.config.schema import VerifierConfig
from ulorl_megatron.data.chat import AHEAD, Chat, Model, asking, fill, template_file
from ulorl_megatron.data.step import Dropped, Outcome, Row, Step, Workspace, in_flight, text_of
from ulorl_megatron.errors import UserError
from ulorl_megatron.verifier import Verifier, VerifierFailed, build_verifier
from ulorl_megatron.verifier.answer import extract_answer

_TEMPLATE = "solve.txt"


@dataclass
class Suspicious(Step):
    """Drops references that several models contradict with one voice: all their answers are equal, and not to it.

    models: two or more, best of different families; each solves every problem once. template: file of their prompt,
    with {question}; null: data/templates/solve.txt. workers: processes that compare answers by the rule. A model
    without a final answer has no voice, and fewer than two voices drop nothing. A reference that the rule cannot judge
    is dropped, since nobody can train on it.
    """

    models: List[Model] = field(default_factory=list)
    template: Optional[str] = None
    workers: int = 2

    def check(self) -> None:
        if len(self.models) < 2:
            raise UserError(f"suspicious.models: {len(self.models)} given; name two or more, one contradicts nobody")

    def files(self) -> Iterable[Path]:
        return [template_file(self.template, _TEMPLATE)]

    def run(self, rows: Iterable[Row], work: Workspace) -> Iterator[Tuple[Row, Outcome]]:
        template = template_file(self.template, _TEMPLATE).read_text(encoding="utf-8")
        with asking(self.models, work.journal()) as (loop, chats):
            verifier = build_verifier(VerifierConfig(workers=self.workers))

            async def outcome(row: Row) -> Outcome:
                prompt = fill(template, {"question": text_of(row)})
                replies = await asyncio.gather(*(_reply(chat, prompt) for chat in chats))
                voices = [answer for answer in map(extract_answer, replies) if answer]
                return await self._judge(row, voices, verifier)

            limit = min(model.concurrency for model in self.models) * AHEAD
            try:
                yield from in_flight(rows, outcome, loop, limit)
            finally:
                loop.run(verifier.close())

    async def _judge(self, row: Row, voices: List[str], verifier: Verifier) -> Outcome:
        async def same(given: str, reference: str) -> bool:
            boxed = rf"\boxed{{{given}}}"
            verdict = await verifier.verify(question=text_of(row), response=boxed, answer=reference)
            return verdict.reward == 1

        try:
            if len(voices) < 2:
                await same(row["answer"], row["answer"])
                return row
            if any([await same(voice, row["answer"]) for voice in voices]):
                return row
        except VerifierFailed as error:
            return Dropped("reference cannot be judged", str(error))
        try:
            one_voice = all([await same(voice, voices[0]) for voice in voices[1:]])
        except VerifierFailed:  # what the first model answered has no value
            one_voice = False
        if one_voice:
            return Dropped("models contradict the reference", f"{len(voices)} models say {voices[0]}")
        return row


async def _reply(chat: Chat, prompt: str) -> str:
    """Empty, which is no voice, where the model fails on this one prompt."""
    try:
        return await chat.ask(prompt)
    except VerifierFailed:
        return ""
