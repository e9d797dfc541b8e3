"""The servers of a run: who gets which request, and who holds which weights."""

import asyncio
import logging
import time
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Dict, List, Optional

from ulorl_megatron.config.schema import Config
from ulorl_megatron.rollout import server as local
from ulorl_megatron.rollout.client import Client, Generation, OutOfMemory, RequestError, Sampling, ServerBusy
from ulorl_megatron.rollout.keeper import Keeper
from ulorl_megatron.rollout.member import Member
from ulorl_megatron.rollout.roll_call import RollCall
from ulorl_megatron.rollout.served_model import ServedModel

log = logging.getLogger(__name__)

_LONGEST_BACKOFF_S = 30.0


class RequestFailed(Exception):
    """A request failed on every try it had."""


class ServerPool:
    """Own servers (start, wait_ready, ..., close) or others, of servers.urls or servers.announced, which are neither
    started nor stopped.

    A server takes part only while it has confirmed the weight version of the pool. Everything async belongs
    to one event loop; requests are made inside `kept`.
    """

    def __init__(self, config: Config, model: ServedModel, *, backoff_s: float = 1.0):
        """Chooses ports; starts nothing. backoff_s: pause before the second try of a request, doubled each
        time.

        Raises UserError when a port is in use.
        """
        self._model = model
        self._request_timeout_s = config.rollout.request_timeout_s
        self._retries = config.rollout.request_retries
        self._backoff_s = backoff_s
        self._expected = 0
        self._failed_tries = 0
        self._out_of_memory = 0
        self._measured_from = time.monotonic()
        if config.servers.urls:
            self.members = [Member(Client(url, model)) for url in config.servers.urls]
        elif config.servers.announced:
            self.members = []  # known once they answered the roll call
        else:
            ports = local.choose_ports(config.servers.port, config.servers.count)
            self.members = [self._own(config, i, port) for i, port in enumerate(ports)]
        self._config = config.servers
        self._roll_call = RollCall(Path(config.run.dir)) if config.servers.announced else None
        self._keeper = Keeper(self.members, config.servers, model)

    def _own(self, config: Config, index: int, port: int) -> Member:
        url = f"http://{local.HOST}:{port}"
        log_file = Path(config.run.dir) / "logs" / f"server-{index}.log"
        process = local.LocalServer(local.command(config, index, port), url, log_file)
        return Member(Client(url, self._model), process, log_file)

    def start(self) -> None:
        """Starts the own servers, or calls for those of others, and returns at once.

        Call it from the main thread: the own servers die with it.
        """
        if self._roll_call is not None:
            self._roll_call.call()
        self._keeper.start()

    async def wait_ready(self) -> None:
        """Until every server serves weight version 0, which is model.path as it is, or is given up.

        A server of another process may hold anything, so it loads model.path first. Raises UserError when none is left,
        when one that is to announce itself does not, or when an own server ends by itself at its first start.
        """
        if self._roll_call is not None:
            present = await self._roll_call.answers(self._config.announced, self._config.start_timeout_s)
            self.members += [Member(Client(p.url, self._model), log=Path(p.log)) for p in present]
        await self._keeper.wait_ready()
        self._measured_from = time.monotonic()

    async def update_weights(self, path: Path, version: int) -> None:
        """Loads an HF directory into every server. The pool's version becomes `version`.

        A server that does not confirm gets no work before it does. Raises UserError when none is left.
        """
        await self._keeper.update(path, version)

    @property
    def version(self) -> int:
        """The weight version that servers must hold to get work."""
        return self._keeper.version

    def serving(self) -> List[Member]:
        """The servers that may get work: alive, with the current weights confirmed."""
        return self._keeper.serving()

    async def open_update(self) -> List[str]:
        """Makes the servers ready for weights by broadcast (weight_sync.distributed); the URLs of those that are."""
        return await self._keeper.open_update()

    async def close_update(self, version: int, failures: Dict[str, str]) -> None:
        """After the broadcast: those that confirm `version` get work again; if some failed, none: broadcast again."""
        await self._keeper.close_update(version, failures)

    def kept(self) -> AbstractAsyncContextManager[None]:
        """While inside, servers that fail are noticed, and brought back with the current weights."""
        return self._keeper.kept()

    def expect(self, tokens: int) -> None:
        """Says how many tokens, input and output, the requests that now begin have together."""
        self._expected = tokens
        for member in self.members:
            member.dispatched = 0

    async def generate(
        self,
        input_ids: List[int],
        sampling: Sampling,
        max_new_tokens: int,
        group: Optional[int] = None,
        cut: Optional[asyncio.Event] = None,
    ) -> Generation:
        """Up to max_new_tokens more tokens, tried 1 + rollout.request_retries times.

        group: requests with the same one begin alike. cut: once it is set, what there is comes back, as aborted.
        A try has rollout.request_timeout_s, and ends when its server is found dead or hanging. While all servers are
        being brought back it waits.
        Raises RequestFailed after the last try, RequestRejected at once, UserError when no server is left.
        """
        tried: List[Member] = []
        for attempt in range(self._retries + 1):
            member = await self._choose(input_ids, max_new_tokens, group, tried)
            tried.append(member)
            try:
                return await self._ask(member, input_ids, sampling, max_new_tokens, group, cut)
            except RequestError as error:
                log.warning("try %d of %d failed: %s", attempt + 1, self._retries + 1, error)
                last = error
                self._failed_tries += 1
                self._out_of_memory += isinstance(error, OutOfMemory)
            if attempt < self._retries:
                await asyncio.sleep(min(self._backoff_s * 2**attempt, _LONGEST_BACKOFF_S))
        raise RequestFailed(f"{self._retries + 1} tries failed; the last: {last}") from last

    async def _choose(
        self, input_ids: List[int], max_new_tokens: int, group: Optional[int], avoid: List[Member]
    ) -> Member:
        """Where the request ends soonest, in tokens outstanding; those to avoid only if there is no other.

        The server that holds the beginning of it is taken while that has less than its fair share of all expected
        tokens: all is asked at once, so until then it only gets now what it would get anyway.
        """
        while not (serving := self.serving()):
            await self._keeper.change()
        choices = [member for member in serving if member not in avoid] or serving
        prefixes = [member.prefix(input_ids, group) for member in choices]
        held, holder = max(zip(prefixes, choices, strict=True), key=lambda pair: pair[0])
        after = holder.outstanding + len(input_ids) + max_new_tokens
        if held and after * len(serving) <= self._expected:
            return holder
        ends = [member.outstanding - prefix for member, prefix in zip(choices, prefixes, strict=True)]
        return choices[ends.index(min(ends))]

    async def _ask(
        self,
        member: Member,
        input_ids: List[int],
        sampling: Sampling,
        max_new_tokens: int,
        group: Optional[int],
        cut: Optional[asyncio.Event],
    ) -> Generation:
        """One try. Raises RequestError and RequestRejected; a fault of the server counts against it."""
        cost = len(input_ids) + max_new_tokens
        member.begin(cost)
        if group is not None:
            member.held[group] = input_ids
        version = self.version
        call = asyncio.ensure_future(
            member.client.generate(input_ids, sampling, max_new_tokens, timeout_s=self._request_timeout_s, cut=cut)
        )
        member.calls.add(call)
        try:
            generation = await call
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():
                raise
            raise RequestError(f"{member.client.url} was taken out of work: it {member.fault}") from None
        except (ServerBusy, OutOfMemory):
            raise
        except RequestError as error:
            if member.version == version:  # else it was taken out meanwhile, for this or another fault
                self._keeper.strike(member, f"failed again and again: {error}")
            raise
        finally:
            call.cancel()
            member.calls.discard(call)
            member.end(cost)
        member.strikes = 0
        self._out_of_memory += generation.out_of_memory
        self._check_versions(member, generation, version)
        return generation

    def _check_versions(self, member: Member, generation: Generation, asked: int) -> None:
        """Raises RequestError if tokens are not of the weights it confirmed: somebody else started it anew."""
        strange = {v for v in generation.versions if not asked <= v <= self.version}
        if strange:
            fault = f"made tokens by weight version {sorted(strange)}, not {asked}"
            if member.version == asked:
                self._keeper.fail(member, fault)
            raise RequestError(f"{member.client.url} {fault}")

    def metrics(self) -> Dict[str, float]:
        """Of monitor.metrics, since the last call."""
        dispatched = [member.dispatched for member in self.members]
        now = time.monotonic()
        busy = sum(member.take_busy_s() for member in self.members)
        metrics = {
            "servers/idle_share": 1 - busy / (len(self.members) * max(now - self._measured_from, 1e-9)),
            "servers/serving": len(self.serving()),
            "servers/missing": len(self.members) - len(self.serving()),
            "servers/restarts": self._keeper.restarts,
            "servers/failed_tries": self._failed_tries,
            "servers/out_of_memory": self._out_of_memory,
        }
        if any(dispatched):
            metrics["servers/imbalance"] = max(dispatched) * len(dispatched) / sum(dispatched)
        self._measured_from = now
        self._keeper.restarts = self._failed_tries = self._out_of_memory = 0
        return metrics

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
