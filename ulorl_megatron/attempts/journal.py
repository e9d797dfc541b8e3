"""The file of attempts: one line each, appended as it is judged, so that a kill loses only what is in flight."""

from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import DefaultDict, List, Optional

from ulorl_megatron.attempts.lines import Lines


@dataclass(frozen=True)
class Attempt:
    """What came of one response; its text is in the file only, since thousands of long ones would fill the memory.

    problem: key of what it answers. tokens: of the response. finished: it ended by EOS, or was cut. reward: 1 right,
    0 wrong or cut; None: the judge could not tell. by: what the verdict rests on (verifier.By), or "truncated",
    "unknown", "failed". answer: the reference it was judged by.
    """

    problem: str
    tokens: int
    finished: bool
    reward: Optional[float]
    by: str
    answer: str


class Journal:
    """The attempts of one policy in the file `path`, those of earlier calls included. Use it as a context manager."""

    def __init__(self, path: Path):
        self._attempts: DefaultDict[str, List[Attempt]] = defaultdict(list)
        self._lines = Lines(path)
        for fields in self._lines.read():
            del fields["response"]
            self._keep(Attempt(**fields))

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *exception) -> None:
        self._lines.close()

    def add(self, attempt: Attempt, response: str) -> None:
        self._keep(attempt)
        self._lines.add(asdict(attempt) | {"response": response})

    def of(self, problem: str) -> List[Attempt]:
        """In the order they were judged."""
        return self._attempts[problem]

    def _keep(self, attempt: Attempt) -> None:
        self._attempts[attempt.problem].append(attempt)
