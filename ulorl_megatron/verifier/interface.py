"""What every verifier offers."""

from typing import Protocol


class VerifierFailed(Exception):
    """The judge gave up on this answer. The sample is failed, which is not wrong: no reward, no training."""


class Verifier(Protocol):
    async def verify(self, *, response: str, answer: str) -> float:
        """1.0 if `response` gives the reference `answer`, 0.0 if it gives another one or none.

        Calls may overlap. Raises VerifierFailed where that cannot be told, and UserError where no answer
        could be judged at all (the judge does not start).
        """

    def close(self) -> None:
        """Ends what the verifier started."""
