"""The hybrid verifier: the rule first, and the language model for what the rule denies or cannot judge."""

import asyncio
import logging

from ulorl_megatron.verifier.answer import extract_answer
from ulorl_megatron.verifier.generative import GenerativeVerifier
from ulorl_megatron.verifier.interface import By, Verdict, VerifierFailed
from ulorl_megatron.verifier.rule import RuleVerifier

log = logging.getLogger(__name__)


class HybridVerifier:
    """See Verifier. It owns both: closing it closes them."""

    def __init__(self, rule: RuleVerifier, model: GenerativeVerifier):
        self._rule = rule
        self._model = model

    async def ready(self) -> None:
        await asyncio.gather(self._rule.ready(), self._model.ready())

    async def close(self) -> None:
        await asyncio.gather(self._rule.close(), self._model.close())

    async def verify(self, *, question: str, response: str, answer: str) -> Verdict:
        given = extract_answer(response)
        if given is None:
            return Verdict(0.0, By.no_answer)
        try:
            if await self._rule.compare(given, answer) == 1.0:
                return Verdict(1.0, By.rule)
        except VerifierFailed as error:
            log.info("the rule gives up, the model decides: %s", error)
        return await self._model.compare(question, given, answer)
