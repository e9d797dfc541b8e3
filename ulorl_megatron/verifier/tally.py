"""What became of the answers of one step."""

from collections import Counter
from typing import Awaitable, Dict

from ulorl_megatron.verifier.interface import By, UnknownVerdict, Verdict


class Tally:
    """Counts verdicts as they pass."""

    def __init__(self):
        self._by: Counter[By] = Counter()
        self._right_by_model = 0
        self._unknown = 0

    async def reward(self, verdict: Awaitable[Verdict]) -> float:
        """The reward of `verdict`, or what it raises."""
        try:
            given = await verdict
        except UnknownVerdict:
            self._unknown += 1
            raise
        self._by[given.by] += 1
        self._right_by_model += given.by in (By.model, By.cache) and given.reward == 1.0
        return given.reward

    def metrics(self) -> Dict[str, float]:
        """Names of monitor.metrics."""
        return {
            **{f"verifier/by_{by.value}": self._by[by] for by in By},
            "verifier/right_by_model": self._right_by_model,
            "verifier/unknown": self._unknown,
        }
