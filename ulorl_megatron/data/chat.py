"""Asking language models behind OpenAI-compatible URLs, each question once."""

import hashlib
import json
import re
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Tuple

from omegaconf import MISSING

from ulorl_megatron.attempts.lines import Lines
from ulorl_megatron.config.schema import JudgeConfig
from ulorl_megatron.errors import UserError
from ulorl_megatron.rollout.loop_thread import LoopThread
from ulorl_megatron.verifier.client import JudgeClient

AHEAD = 4  # rows to begin for each request that may be in flight

_TEMPLATES = Path(__file__).parent / "templates"


@dataclass
class Model:
    """A model to ask: the keys are those of verifier.judge, see JudgeConfig."""

    url: str = MISSING
    model: Optional[str] = None
    key_variable: Optional[str] = None
    temperature: float = 0.0
    max_tokens: int = 8192
    concurrency: int = 64
    timeout_s: float = 600.0
    retries: int = 3
    hold_s: float = 600.0


class Answers:
    """What models answered, kept in the file `path`."""

    def __init__(self, path: Path):
        self._lines = Lines(path)
        self._known: Dict[str, str] = {entry["key"]: entry["answer"] for entry in self._lines.read()}

    def get(self, key: str) -> Optional[str]:
        return self._known.get(key)

    def add(self, key: str, answer: str, model: str) -> None:
        self._known[key] = answer
        self._lines.add({"key": key, "model": model, "answer": answer})

    def close(self) -> None:
        self._lines.close()


class Chat:
    """One model. Use it inside one event loop, and close it there."""

    def __init__(self, model: Model, answers: Answers):
        self._model = model
        self._answers = answers
        self._client = JudgeClient(JudgeConfig(**asdict(model)))

    async def ask(self, prompt: str) -> str:
        """The reply to one message of the user; from the file if it was asked before.

        Raises VerifierFailed and UserError as JudgeClient.ask does.
        """
        m = self._model
        key = hashlib.sha256(json.dumps([m.url, m.model, m.temperature, m.max_tokens, prompt]).encode()).hexdigest()
        known = self._answers.get(key)
        if known is None:
            try:
                known = await self._client.ask(prompt)
            except UserError as error:
                raise UserError(
                    f"model {m.model or ''} at {m.url}: {error}. Replies so far are kept: the same command goes on"
                ) from error
            self._answers.add(key, known, m.model or m.url)
        return known

    async def close(self) -> None:
        await self._client.close()


@contextmanager
def asking(models: List[Model], journal: Path) -> Iterator[Tuple[LoopThread, List[Chat]]]:
    """An event loop and the models in it; what they answer is kept in the file `journal`."""
    answers = Answers(journal)
    try:
        with LoopThread() as loop:
            chats = [Chat(model, answers) for model in models]
            try:
                yield loop, chats
            finally:
                for chat in chats:
                    loop.run(chat.close())
    finally:
        answers.close()


def template_file(given: Optional[str], name: str) -> Path:
    """The file of a prompt: the person's, or ours of that name."""
    return Path(given) if given else _TEMPLATES / name


def fill(template: str, values: dict) -> str:
    """The template with {name} replaced; other braces stay, and so do braces in the values."""
    return re.sub(r"\{(\w+)\}", lambda match: values.get(match[1], match[0]), template)
