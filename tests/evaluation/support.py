"""A policy of known skill: a server whose responses are right with a probability that its weights decide; a judge."""

import asyncio
import random
from contextlib import contextmanager
from typing import Callable, Dict, Iterator, List

from tests.fake_server import FakeServer
from tests.tiny_models import EOS, tiny_tokenizer
from ulorl_megatron.rollout.loop_thread import LoopThread
from ulorl_megatron.verifier import RuleVerifier

MARK = "<|im_start|>assistant\n"
WRONG = r"So it is \boxed{999}"


class SkilledServer(FakeServer):
    """answers: prompt's text -> right answer. skill: content of model.safetensors -> probability of a right response.

    A prompt with "long" in it gets responses without an end.
    """

    def __init__(self, answers: Dict[str, str], skill: Callable[[bytes], float], seed: int = 0):
        super().__init__()
        self._tokenizer = tiny_tokenizer()
        self._answers = answers
        self._skill = skill
        self._random = random.Random(seed)

    def next_token(self, context: List[int], greedy: bool, eos: int) -> int:
        prompt, _, so_far = self._tokenizer.decode(context).partition(MARK)
        so_far = so_far.removeprefix("<think>\n")  # of a template that opens the thinking
        if "long" in prompt:
            return self._id("x")
        right = next(answer for text, answer in self._answers.items() if f"\n{text}<" in prompt)
        choices = [c for c in (rf"So it is \boxed{{{right}}}", WRONG) if c.startswith(so_far)]
        if choices == [so_far]:
            return EOS
        nexts = [c[len(so_far)] for c in choices]
        takes_right = len(nexts) == 1 or self._random.random() < self._skill(self._weights)
        return self._id(nexts[0 if takes_right else 1])

    def _id(self, character: str) -> int:
        return self._tokenizer.encode(character)[0]

    @contextmanager
    def running(self) -> Iterator[str]:
        """Serves in a thread of its own; the URL."""
        with LoopThread() as loop:
            server = self.serve()
            yield loop.run(server.__aenter__())
            loop.run(server.__aexit__(None, None, None))


class _SharedRule(RuleVerifier):
    async def close(self) -> None:
        """Not when one of its users ends."""


@contextmanager
def shared_rule_verifier() -> Iterator[RuleVerifier]:
    """A real rule verifier of one worker that outlives its users."""
    verifier = _SharedRule(workers=1, timeout_s=10.0, retries=1)
    yield verifier
    asyncio.run(RuleVerifier.close(verifier))
