"""What a step of a pipeline is: settings, and a function from rows to outcomes."""

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Awaitable, Callable, Deque, Iterable, Iterator, Tuple

from ulorl_megatron.data.files import Row
from ulorl_megatron.data.layouts import Dropped, Outcome
from ulorl_megatron.rollout.loop_thread import LoopThread

__all__ = ["Dropped", "Outcome", "Row", "RowStep", "Step", "Workspace", "in_flight", "text_of", "with_text"]


@dataclass(frozen=True)
class Workspace:
    """Where a step may keep what it must not do twice: `folder` stays until the pipeline is done, and its
    answers/ goes with the result. name: of the step; what steps of the same name keep must not clash."""

    folder: Path
    name: str

    def journal(self, bound: str = "") -> Path:
        """The file of what models answered to steps of this name. bound: what the answers depend on besides."""
        folder = self.folder / "answers"
        folder.mkdir(exist_ok=True)
        return folder / (f"{self.name}-{bound}.jsonl" if bound else f"{self.name}.jsonl")


@dataclass
class Step(ABC):
    """The settings are the fields of the class. One step object runs once."""

    def check(self) -> None:
        """Raises UserError for settings that no type forbids."""
        return  # most steps have none

    def files(self) -> Iterable[Path]:
        """Files besides the rows on which the result depends; their hashes go into the manifest."""
        return ()

    @abstractmethod
    def run(self, rows: Iterable[Row], work: Workspace) -> Iterator[Tuple[Row, Outcome]]:
        """(row, what became of it), in order."""


@dataclass
class RowStep(Step):
    """A step that looks at one row at a time."""

    def run(self, rows: Iterable[Row], work: Workspace) -> Iterator[Tuple[Row, Outcome]]:
        return ((row, self.outcome(row)) for row in rows)

    @abstractmethod
    def outcome(self, row: Row) -> Outcome:
        """What becomes of the row."""


def text_of(row: Row) -> str:
    """What the prompt says: the string, or the last message of the user."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return prompt
    return next((m["content"] for m in reversed(prompt) if m["role"] == "user"), "")


def with_text(row: Row, text: str) -> Row:
    """The row with `text` in the place of text_of."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        return row | {"prompt": text}
    last = max(i for i, message in enumerate(prompt) if message["role"] == "user")
    return row | {"prompt": [*prompt[:last], prompt[last] | {"content": text}, *prompt[last + 1 :]]}


def in_flight(
    rows: Iterable[Row], outcome: Callable[[Row], Awaitable[Outcome]], loop: LoopThread, limit: int
) -> Iterator[Tuple[Row, Outcome]]:
    """Outcomes in the order of the rows, `limit` of them in work in `loop` at a time."""
    begun: Deque[Tuple[Row, asyncio.Task]] = deque()
    for row in rows:
        begun.append((row, loop.start(outcome(row))))
        if len(begun) >= limit:
            first, running = begun.popleft()
            yield first, loop.run(_end(running))
    for row, running in begun:
        yield row, loop.run(_end(running))


async def _end(running: "asyncio.Task[Outcome]") -> Outcome:
    return await running
