"""The file of attempts: one line each, appended as it is judged, so that a kill loses only what is in flight."""

import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import DefaultDict, Dict, List, Optional


@dataclass(frozen=True)
class Attempt:
    """One response. problem: key of what it answers. tokens: of the response. finished: it ended by EOS, or was cut.

    reward: 1 right, 0 wrong or cut; None: the judge could not tell. by: what the verdict rests on (verifier.By), or
    "truncated", "unknown", "failed". answer: the reference it was judged by.
    """

    problem: str
    tokens: int
    finished: bool
    reward: Optional[float]
    by: str
    answer: str
    response: str


class Journal:
    """The attempts of one policy in the file `path`, those of earlier calls included. Use it as a context manager."""

    def __init__(self, path: Path):
        self._attempts: DefaultDict[str, List[Attempt]] = defaultdict(list)
        if path.exists():
            content = path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            if len(whole) < len(content):  # the last line was cut by a kill
                with path.open("r+b") as file:
                    file.truncate(len(whole))
            for line in whole.splitlines():
                attempt = Attempt(**json.loads(line))
                self._attempts[attempt.problem].append(attempt)
        self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *exception) -> None:
        self._file.close()

    def add(self, attempt: Attempt) -> None:
        self._attempts[attempt.problem].append(attempt)
        self._file.write(json.dumps(asdict(attempt), ensure_ascii=False) + "\n")
        self._file.flush()

    def of(self, problem: str) -> List[Attempt]:
        """In the order they were judged."""
        return self._attempts[problem]

    def counts(self) -> Dict[str, int]:
        return {problem: len(attempts) for problem, attempts in self._attempts.items()}
