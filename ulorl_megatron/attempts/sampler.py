"""Servers and a verifier without a trainer."""

import copy
import hashlib
import json
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Callable, List, Optional, Sequence, Tuple

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from ulorl_megatron.attempts.journal import Attempt, Journal
from ulorl_megatron.config.schema import Config
from ulorl_megatron.errors import UserError
from ulorl_megatron.rollout.client import Finish, Generation, Sampling
from ulorl_megatron.rollout.loop_thread import LoopThread
from ulorl_megatron.rollout.scheduler import SegmentRollout
from ulorl_megatron.rollout.served_model import ServedModel
from ulorl_megatron.rollout.server_pool import RequestFailed, ServerPool
from ulorl_megatron.rollout.tasks import task_group
from ulorl_megatron.verifier import UnknownVerdict, VerifierFailed, build_verifier
from ulorl_megatron.verifier.texts import judged_texts


@dataclass(frozen=True)
class Problem:
    """tokens: ids of the prompt. answer: the reference."""

    tokens: List[int]
    answer: str

    @cached_property
    def key(self) -> str:
        """What its attempts are filed under; depends on prompt and reference alone."""
        return hashlib.sha256(json.dumps([self.tokens, self.answer]).encode()).hexdigest()[:24]


class Sampler:
    """The servers of `config`, started or given by URL, with model.path in them, and its verifier.

    folder: where the servers' logs go, below logs/. Use it as a context manager, from the main thread. Raises UserError
    when a server does not start, a port is in use, or the judge is not to be had.
    """

    def __init__(self, config: Config, folder: Path):
        self._config = copy.deepcopy(config)
        self._config.run.dir = str(folder)  # never that of the run, which may be going on
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(config.model.path)
        self._model = ServedModel.from_path(Path(config.model.path))
        self._version = 0
        self._opened = ExitStack()

    def __enter__(self) -> "Sampler":
        with ExitStack() as opened:
            self._servers = ServerPool(self._config, self._model)
            self._rollout = SegmentRollout(self._servers, self._config.rollout)
            self.loop = opened.enter_context(LoopThread())
            opened.callback(lambda: self.loop.run(self._servers.close()))
            self._servers.start()
            self._verifier = build_verifier(self._config.verifier)
            opened.callback(lambda: self.loop.run(self._verifier.close()))
            self.loop.run(self._servers.wait_ready())
            self.loop.run(self._verifier.ready())
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *exception) -> None:
        self._opened.close()

    def load(self, folder: Path) -> None:
        """All servers take the weights of the HF folder, of a model like model.path."""
        self._version += 1
        self.loop.run(self._servers.update_weights(folder, self._version))

    async def attempts(
        self,
        problem: Problem,
        count: int,
        sampling: Sampling,
        journal: Journal,
        done: Callable[[Attempt], None] = lambda attempt: None,
    ) -> Sequence[Attempt]:
        """The first `count` attempts at the problem; those the journal lacks are made now, and told to `done`.

        Raises UserError if a response cannot be had: an average over fewer would be another measure.
        """
        missing = count - len(journal.of(problem.key))
        if missing > 0:
            async with self._servers.kept(), task_group() as tasks:
                for _ in range(missing):
                    tasks.create_task(self._attempt(problem, sampling, journal, done))
        return journal.of(problem.key)[:count]

    async def _attempt(
        self, problem: Problem, sampling: Sampling, journal: Journal, done: Callable[[Attempt], None]
    ) -> None:
        try:
            response = await self._rollout.respond(problem.tokens, int(problem.key[:12], 16), sampling)
        except RequestFailed as error:
            raise UserError(
                f"{error}; logs/ has what the servers said. What was answered so far is kept; give the same command "
                "again"
            ) from error
        question, text = judged_texts(self.tokenizer, problem.tokens, response.tokens)
        reward, by = await self._judge(problem, question, response, text)
        finished = response.finish is Finish.eos
        attempt = Attempt(problem.key, len(response.tokens), finished, reward, by, problem.answer)
        journal.add(attempt, text)
        done(attempt)

    async def _judge(
        self, problem: Problem, question: str, response: Generation, text: str
    ) -> Tuple[Optional[float], str]:
        """(reward, by) of Attempt."""
        if response.finish is not Finish.eos:
            return 0.0, "truncated"
        try:
            verdict = await self._verifier.verify(question=question, response=text, answer=problem.answer)
        except UnknownVerdict:
            return None, "unknown"
        except VerifierFailed:
            return None, "failed"
        return verdict.reward, verdict.by.value
