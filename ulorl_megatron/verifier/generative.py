"""The generative verifier of UloRL (arXiv 2507.19766): a language model says whether an answer means the reference."""

import asyncio
from collections import OrderedDict
from pathlib import Path
from typing import Optional, Tuple
from weakref import WeakValueDictionary

from ulorl_megatron.config.schema import JudgeConfig
from ulorl_megatron.verifier.answer import extract_answer, reference_answer
from ulorl_megatron.verifier.client import JudgeClient
from ulorl_megatron.verifier.interface import By, UnknownVerdict, Verdict
from ulorl_megatron.verifier.prompt import PACKAGED, Template, parse_reply

_Key = Tuple[str, str, str]


class GenerativeVerifier:
    """See Verifier. The model sees question, reference and the extracted answer only, each delimited.

    The majority of config.votes decides; without one, or when the model cannot tell, UnknownVerdict. Verdicts are
    kept for config.cache_size triples of question, answer and reference, the latest used.
    """

    def __init__(self, config: JudgeConfig, client: Optional[JudgeClient] = None):
        self._votes = config.votes
        self._template = Template(PACKAGED if config.template is None else Path(config.template))
        self._client = client or JudgeClient(config)
        self._rewards: OrderedDict[_Key, float] = OrderedDict()
        self._cache_size = config.cache_size
        self._asking: WeakValueDictionary[_Key, asyncio.Lock] = WeakValueDictionary()

    async def ready(self) -> None:
        await self._client.ready()

    async def close(self) -> None:
        await self._client.close()

    async def verify(self, *, question: str, response: str, answer: str) -> Verdict:
        given = extract_answer(response)
        if given is None:
            return Verdict(0.0, By.no_answer)
        return await self.compare(question, given, answer)

    async def compare(self, question: str, given: str, answer: str) -> Verdict:
        """Verdict on the extracted answer `given`; equal ones at the same time are asked about once."""
        key = (question, given, reference_answer(answer))
        lock = self._asking.setdefault(key, asyncio.Lock())
        async with lock:
            if key in self._rewards:
                self._rewards.move_to_end(key)
                return Verdict(self._rewards[key], By.cache)
            reward = await self._majority(*key)
            self._rewards[key] = reward
            if len(self._rewards) > self._cache_size:
                self._rewards.popitem(last=False)
            return Verdict(reward, By.model)

    async def _majority(self, question: str, given: str, reference: str) -> float:
        prompt = self._template.fill(question=question, reference=reference, answer=given)
        replies = await asyncio.gather(*(self._client.ask(prompt) for _ in range(self._votes)))
        votes = [parse_reply(reply) for reply in replies]
        for reward in (0.0, 1.0):
            if 2 * votes.count(reward) > self._votes:
                return reward
        raise UnknownVerdict(
            f"answer {given!r}, reference {reference!r}: {votes.count(1.0)} votes for, {votes.count(0.0)} against, "
            f"{votes.count(None)} unknown; the last reply ends in {replies[-1][-100:]!r}"
        )
