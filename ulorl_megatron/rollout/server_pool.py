"""The servers of a run: who gets which request, and who holds which weights."""

import asyncio
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Awaitable, Callable, List, Optional

from ulorl_megatron.config.schema import Config
from ulorl_megatron.errors import UserError
from ulorl_megatron.rollout import server as local
from ulorl_megatron.rollout.client import (
    Client,
    Generation,
    RequestError,
    Sampling,
    WeightUpdateFailed,
)
from ulorl_megatron.rollout.served_model import ServedModel

log = logging.getLogger(__name__)

_READY_POLL_S = 0.5
_LONGEST_BACKOFF_S = 30.0


class RequestFailed(Exception):
    """A request failed on every try it had."""


@dataclass
class Member:
    """One server. process: set if this run started it. version: weight version it confirmed; None gets no
    work.

    outstanding: tokens asked of it and not yet answered (input ones included, they may have to be computed
    anew).
    """

    client: Client
    process: Optional[local.LocalServer] = None
    version: Optional[int] = None
    outstanding: int = 0


class ServerPool:
    """Own servers (start, wait_ready, ..., close) or those of servers.urls, which are neither started nor
    stopped.

    A server takes part only while it has confirmed the weight version of the pool. Everything async belongs
    to one event loop.
    """

    def __init__(self, config: Config, model: ServedModel, *, backoff_s: float = 1.0):
        """Chooses ports; starts nothing. backoff_s: pause before the second try of a request, doubled each
        time.

        Raises UserError when a port is in use.
        """
        self.version = 0
        self._model = model
        self._start_timeout_s = config.servers.start_timeout_s
        self._request_timeout_s = config.rollout.request_timeout_s
        self._retries = config.rollout.request_retries
        self._backoff_s = backoff_s
        if config.servers.urls:
            self.members = [Member(Client(url, model)) for url in config.servers.urls]
        else:
            ports = local.choose_ports(config.servers.port, config.servers.count)
            self.members = [self._own(config, i, port) for i, port in enumerate(ports)]

    def _own(self, config: Config, index: int, port: int) -> Member:
        url = f"http://{local.HOST}:{port}"
        log_file = Path(config.run.dir) / "logs" / f"server-{index}.log"
        process = local.LocalServer(local.command(config, index, port), url, log_file)
        return Member(Client(url, self._model), process)

    def start(self) -> None:
        """Starts the own servers and returns at once. Call it from the main thread: they die with it."""
        for member in self.members:
            if member.process is not None:
                member.process.start()

    async def wait_ready(self) -> None:
        """Until every server answers and holds weight version 0, which is model.path as it is.

        A server given by URL may hold anything, so it loads model.path first. Raises UserError, with the end
        of the log, when an own server ends or when servers.start_timeout_s pass.
        """
        await asyncio.gather(*(self._wait_one(member) for member in self.members))

    async def _wait_one(self, member: Member) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        if member.process is None:
            await self._until(member, member.client.reachable, deadline)
            await member.client.update_weights_from_disk(str(self._model.path.resolve()), 0)
        await self._until(member, member.client.healthy, deadline)
        member.version = 0

    async def _until(self, member: Member, condition: Callable[[], Awaitable[bool]], deadline: float) -> None:
        while not await condition():
            if member.process is not None:
                member.process.check_alive()
            if time.monotonic() > deadline:
                log_end = f" Its log ends:\n{member.process.log_tail()}" if member.process else ""
                raise UserError(
                    f"the server at {member.client.url} is not ready after {self._start_timeout_s:g} s; "
                    f"look at it, or raise servers.start_timeout_s.{log_end}"
                )
            await asyncio.sleep(_READY_POLL_S)

    async def update_weights(self, path: Path, version: int) -> None:
        """Loads an HF directory into every server, each addressed directly. The pool's version becomes
        `version`.

        A server that does not confirm gets no work until it confirms a later version. Raises
        WeightUpdateFailed when none confirmed.
        """
        self.version = version
        outcomes = await asyncio.gather(
            *(self._update_one(member, path, version) for member in self.members), return_exceptions=True
        )
        failures = [outcome for outcome in outcomes if outcome is not None]
        for failure in failures:
            if not isinstance(failure, WeightUpdateFailed):
                raise failure
            log.error("%s; it gets no work", failure)
        if len(failures) == len(self.members):
            raise WeightUpdateFailed("no server holds the new weights: " + "; ".join(map(str, failures)))

    async def _update_one(self, member: Member, path: Path, version: int) -> None:
        member.version = None
        await member.client.update_weights_from_disk(str(path.resolve()), version)
        member.version = version

    async def generate(self, input_ids: List[int], sampling: Sampling, max_new_tokens: int) -> Generation:
        """Up to max_new_tokens more tokens from the least loaded server, tried 1 + rollout.request_retries
        times.

        A try has rollout.request_timeout_s. Raises RequestFailed after the last one, RequestRejected at once,
        UserError when no server is left.
        """
        tried: List[Member] = []
        for attempt in range(self._retries + 1):
            member = self._choose(avoid=tried)
            tried.append(member)
            cost = len(input_ids) + max_new_tokens
            member.outstanding += cost
            try:
                return await member.client.generate(
                    input_ids, sampling, max_new_tokens, timeout_s=self._request_timeout_s
                )
            except RequestError as error:
                log.warning("try %d of %d failed: %s", attempt + 1, self._retries + 1, error)
                last = error
            finally:
                member.outstanding -= cost
            if attempt < self._retries:
                await asyncio.sleep(min(self._backoff_s * 2**attempt, _LONGEST_BACKOFF_S))
        raise RequestFailed(f"{self._retries + 1} tries failed; the last: {last}") from last

    def _choose(self, avoid: List[Member]) -> Member:
        """The usable server with the fewest outstanding tokens, those to avoid only if there is no other."""
        usable = [m for m in self.members if m.version == self.version and (m.process is None or m.process.alive())]
        if not usable:
            for member in self.members:
                if member.process is not None:
                    member.process.check_alive()
            raise UserError(f"no server holds weight version {self.version}; see logs/server-*.log and restart the run")
        fresh = [m for m in usable if m not in avoid]
        return min(fresh or usable, key=lambda m: m.outstanding)

    async def close(self) -> None:
        """Closes the connections and stops the own servers."""
        for member in self.members:
            await member.client.close()
        self.stop()

    def stop(self) -> None:
        """Stops the own servers; usable where no event loop runs any more."""
        for member in self.members:
            if member.process is not None:
                member.process.stop()
