"""How a trainer finds servers that other processes started, on other machines: by files of the run directory.

servers/call       a word that a trainer makes up when it starts
servers/N.json     the answer of server N: that word, its URL and its log; written by a server that is ready
servers/N.lock     locked by the process that keeps server N

An answer to an earlier call counts for nothing, so what servers of an earlier start left behind is never believed.
"""

import asyncio
import json
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import List

from checkpoint_tools.publish import lock_or_close, write_atomically
from ulorl_megatron.errors import UserError

_POLL_S = 0.5


@dataclass(frozen=True)
class Present:
    """One answer. number: of the server, from 0 on. log: its file, as the trainer can read it too."""

    call: str
    number: int
    url: str
    log: str


def server_log(run_dir: Path, number: int) -> Path:
    """The log of server `number`, whoever keeps it."""
    return run_dir / "logs" / f"server-{number}.log"


class RollCall:
    """The trainer's side. One trainer at a time may have a run directory."""

    def __init__(self, run_dir: Path):
        self._run_dir = run_dir
        self._word = uuid.uuid4().hex

    def call(self) -> None:
        """Asks all servers, those that come later included, to say where they are."""
        folder = self._run_dir / "servers"
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / "call", self._word.encode())

    async def answers(self, count: int, timeout_s: float) -> List[Present]:
        """The answers of servers 0 to count - 1, once all are there. Raises UserError naming those that are missing."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = [self._answer(number) for number in range(count)]
            present = [answer for answer in found if answer is not None]
            if len(present) == count:
                return present
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(_POLL_S)
        missing = [number for number in range(count) if found[number] is None]
        logs = ", ".join(f"server {number} (log {server_log(self._run_dir, number)})" for number in missing)
        there = ", ".join(f"{answer.number} at {answer.url}" for answer in present) or "none"
        raise UserError(
            f"servers.announced: {len(missing)} of {count} servers did not announce themselves within {timeout_s:g} s "
            f"(servers.start_timeout_s): {logs}. Announced: {there}. `ulorl serve` with the same run.dir starts them"
        )

    def _answer(self, number: int):
        file = self._run_dir / "servers" / f"{number}.json"
        if not file.exists():
            return None
        answer = Present(**json.loads(file.read_text()))
        return answer if answer.call == self._word else None


class Attendance:
    """The side of server `number`. A context manager; raises UserError if another process keeps that number."""

    def __init__(self, run_dir: Path, number: int, url: str, log: Path):
        self._folder = run_dir / "servers"
        self._number, self._url, self._log = number, url, log
        self._answered = ""

    def __enter__(self) -> "Attendance":
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = (self._folder / f"{self._number}.lock").open("w")
        keeper = f"another process keeps server {self._number} of this run"
        lock_or_close(self._lock, UserError(f"{self._folder}: {keeper}; give another --number"))
        return self

    def __exit__(self, *exception) -> None:
        self._lock.close()

    def answer(self) -> None:
        """Answers the last call, if there is one that it has not answered. Only for a server that is ready."""
        call = self._folder / "call"
        if not call.exists() or (word := call.read_text()) == self._answered:
            return
        present = Present(word, self._number, self._url, str(self._log))
        write_atomically(self._folder / f"{self._number}.json", json.dumps(asdict(present)).encode())
        self._answered = word
        print(f"server {self._number}: announced to the trainer", flush=True)
