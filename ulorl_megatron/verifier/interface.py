"""What every verifier offers."""

from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class By(Enum):
    """What a verdict rests on: the rule, the model now, the model earlier (cache), or that there is no answer."""

    rule = "rule"
    model = "model"
    cache = "cache"
    no_answer = "no_answer"


@dataclass(frozen=True)
class Verdict:
    """reward: 1.0 right, 0.0 wrong; nothing between."""

    reward: float
    by: By


class VerifierFailed(Exception):
    """The judge gave up on this answer. The sample is failed, which is not wrong: no reward, no training."""


class UnknownVerdict(VerifierFailed):
    """The judge answered, but not whether the answer is right."""


class Verifier(Protocol):
    """Several users may share one; all of them in one event loop."""

    async def ready(self) -> None:
        """Waits until answers can be judged. Raises UserError where that will not be."""

    async def verify(self, *, question: str, response: str, answer: str) -> Verdict:
        """Whether `response` to `question` gives the reference `answer`.

        Calls may overlap. Raises UnknownVerdict or VerifierFailed where that cannot be told, which is never a 0,
        and UserError where no answer could be judged at all (the judge does not start, or is gone for too long).
        """

    async def close(self) -> None:
        """Ends what the verifier started."""
