"""The life of the servers: started, loaded with the current weights, watched, and brought back when they fail."""

import asyncio
import logging
import subprocess
import time
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import AsyncIterator, Awaitable, Callable, Dict, List, Optional

from ulorl_megatron.config.schema import ServersConfig
from ulorl_megatron.errors import UserError
from ulorl_megatron.rollout.client import WeightUpdateFailed
from ulorl_megatron.rollout.member import Member
from ulorl_megatron.rollout.served_model import ServedModel
from ulorl_megatron.rollout.server import log_tail
from ulorl_megatron.rollout.tasks import task_group

log = logging.getLogger(__name__)

_POLL_S = 0.5
_GLANCE_S = 5.0
_STRIKES = 3


class Keeper:
    """Looks after `members`. version: of the weights that a server must have confirmed to get work.

    A server that fails gets no work at once. An own one is started again, another one is waited for; it gets the
    current weights and must confirm them before any work (NeMo-RL#3187, #3613). Each has servers.max_restarts of that.
    """

    def __init__(self, members: List[Member], config: ServersConfig, model: ServedModel):
        self.version = 0
        self.restarts = 0
        self._members = members
        self._config = config
        self._model = model
        self._weights: Optional[Path] = None
        self._by_broadcast = False  # the current weights are in no folder
        self._users = 0  # of `kept`
        self._keeping: Optional[asyncio.Task] = None
        self._change = asyncio.Event()

    def start(self) -> None:
        """Starts the own servers and returns at once. Call it from the main thread: they die with it."""
        for member in self._members:
            if member.process is not None:
                member.process.start()
                self._expect(member)

    async def wait_ready(self) -> None:
        """Until every server serves weight version 0, which is model.path as it is, or is given up.

        Raises UserError, with the end of the log, when an own server ends by itself (its flags or the model are
        wrong, and would be again), and when none is left.
        """
        for member in self._members:
            if member.process is None:
                self._expect(member)
        async with task_group() as tasks:
            for member in self._members:
                tasks.create_task(self._bring_back(member, first=True))
        self.check_left()

    async def update(self, path: Path, version: int) -> None:
        """Loads the HF directory `path` as `version` into every server that answers, each addressed directly.

        Those that do not confirm get no work before they do. Raises UserError if none ever does.
        """
        self._weights, self.version, self._by_broadcast = path.resolve(), version, False
        serving = [m for m in self._members if m.version is not None]
        for member in self._members:
            member.version = None
            member.held.clear()
        async with task_group() as tasks:
            for member in self._members:
                if not member.gone:
                    tasks.create_task(self._load(member) if member in serving else self._load_if_back(member))
        if not self.serving():
            async with self.kept():
                while not self.serving():
                    await self.change()

    async def open_update(self) -> List[str]:
        """Pauses every server that answers, for weights that come by broadcast; their URLs. They get no work meanwhile.

        Raises UserError if there is none.
        """
        for member in self._members:
            if not member.gone and not member.dead and (member.version is not None or await self._answers(member)):
                member.version = None
                member.held.clear()
                try:
                    await self._while_it_lives(member, member.client.open_weight_update())
                    member.open = True
                except WeightUpdateFailed as error:
                    self.fail(member, f"did not open for the weights: {error}")
        self.check_left()
        opened = [member.client.url for member in self._members if member.open]
        if not opened:
            raise UserError(f"no server is there to take weights: {self._faults()}")
        return opened

    async def close_update(self, version: int, failures: Dict[str, str]) -> None:
        """After the broadcast. The servers confirm `version` and get work; if some failed, none does: try again.

        failures: URL -> what went wrong, of those that count as failed now.
        """
        self.version, self._weights, self._by_broadcast = version, None, True
        for member in [m for m in self._members if m.open]:
            member.open = False
            if member.client.url in failures:
                self.fail(member, f"did not take the weights: {failures[member.client.url]}")
                continue
            try:
                closing = member.client.close_weight_update(None if failures else version)
                await self._while_it_lives(member, closing)
            except WeightUpdateFailed as error:
                self.fail(member, f"did not take the weights: {error}")
            else:
                member.version, member.strikes = None if failures else version, 0
        self._tell()

    def serving(self) -> List[Member]:
        """The members that may get work."""
        return [m for m in self._members if m.version == self.version and not m.dead]

    async def change(self) -> None:
        """Waits until a server came back or failed. Raises UserError when none can come back."""
        self.check_left()
        if not self._users or self._by_broadcast:
            raise UserError(f"no server serves weight version {self.version}: {self._faults()}")
        await self._change.wait()

    def check_left(self) -> None:
        if all(member.gone for member in self._members):
            raise UserError(
                f"no server is left: {self._faults()}\nWhat was decoded is safe in the pools. Mend the servers, "
                "then run the same command again (servers.max_restarts is how often one may fail)"
            )

    @asynccontextmanager
    async def kept(self) -> AsyncIterator[None]:
        """While inside, the servers are watched, and those that failed are brought back while the others work.

        Several may be inside at once; the servers are watched until the last has left.
        """
        self._users += 1
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep_all())
        try:
            async with task_group() as tasks:
                fault = tasks.create_task(_raise_of(self._keeping))
                try:
                    yield
                finally:
                    fault.cancel()
        finally:
            self._users -= 1
            if not self._users:
                keeping, self._keeping = self._keeping, None
                keeping.cancel()
                await asyncio.wait({keeping})

    def strike(self, member: Member, fault: str) -> None:
        """A try that failed by the server's fault. The third in a row takes it out."""
        member.strikes += 1
        if member.strikes >= _STRIKES:
            self.fail(member, fault)

    def fail(self, member: Member, fault: str, *, final: bool = False) -> None:
        """No more work for it, until it was started again (or answers again) and confirmed the weights."""
        member.take_out(fault)
        member.gone = final or member.returns >= self._config.max_restarts
        log.error("the server at %s %s; %s", member.client.url, fault, "given up" if member.gone else "to be had again")
        if not member.gone:
            member.returns += 1
            self.restarts += 1
            self._expect(member)
        if member.process is not None:
            try:
                member.process.kill()
                if not member.gone:
                    member.process.start()
            except subprocess.TimeoutExpired:
                member.fault, member.gone = f"{fault}, and cannot be killed", True
        self._tell()

    def _expect(self, member: Member) -> None:
        member.answered = False
        member.deadline = time.monotonic() + self._config.start_timeout_s

    def _tell(self) -> None:
        self._change.set()
        self._change = asyncio.Event()

    def _faults(self) -> str:
        return "; ".join(
            f"{m.client.url} {m.fault or 'has not confirmed it'}"
            + (f". Its log ends:\n{log_tail(m.log)}" if m.log is not None else "")
            for m in self._members
        )

    async def _keep_all(self) -> None:
        async with task_group() as tasks:
            for member in self._members:
                tasks.create_task(self._keep(member))

    async def _keep(self, member: Member) -> None:
        while not member.gone:
            await self._bring_back(member)
            if member.gone:
                return
            watch = asyncio.create_task(self._silence(member, partial(self._works, member)))
            member.calls.add(watch)
            try:
                await asyncio.wait({watch})
            finally:
                member.calls.discard(watch)
                watch.cancel()
            if not watch.cancelled():
                self.fail(member, watch.result())

    async def _works(self, member: Member, *, timeout_s: float) -> bool:
        """Whether it makes tokens, or, while weights are loaded into it and it is paused, whether it answers at all."""
        question = member.client.reachable if member.version is None else member.client.healthy
        return await question(timeout_s=timeout_s)

    async def _bring_back(self, member: Member, *, first: bool = False) -> None:
        """Until it serves the current weights or is given up. first: its own end is the fault of the configuration."""
        while member.version is None and not member.gone:
            if member.dead:
                if first and not member.returns and member.process.returncode > 0:
                    member.process.check_alive()
                self.fail(member, member.process.ending())
            elif member.open:
                await self._change.wait()
            elif await self._answers(member):
                if self._by_broadcast:  # it takes part in the next one
                    await self._change.wait()
                else:
                    await self._load(member)
            elif time.monotonic() > member.deadline:
                late = f"is not ready after {self._config.start_timeout_s:g} s (servers.start_timeout_s)"
                self.fail(member, late, final=member.process is None)
            else:
                await asyncio.sleep(_POLL_S)

    async def _answers(self, member: Member) -> bool:
        """Whether weights can be loaded. An own server must first have made a token; it may be paused since."""
        own = member.process is not None
        question = member.client.healthy if own and not member.answered else member.client.reachable
        timeout_s = min(_GLANCE_S, self._config.hang_timeout_s)
        member.answered = await question(timeout_s=timeout_s) or member.answered
        return member.answered

    async def _load_if_back(self, member: Member) -> None:
        if not member.dead and await self._answers(member):
            await self._load(member)

    async def _load(self, member: Member) -> None:
        """The current weights, confirmed; a failed update is fatal for the server as it is (AReaL#140).

        One at a time: SGLang ends on a second update while one is under way.
        """
        returns = member.returns
        async with member.loading:
            if member.version is None and not member.gone and member.returns == returns:
                await self._load_now(member)

    async def _load_now(self, member: Member) -> None:
        version = self.version
        try:
            if self._weights is not None or member.process is None:
                path = self._weights or self._model.path.resolve()
                await self._while_it_lives(member, member.client.update_weights_from_disk(str(path), version))
        except WeightUpdateFailed as error:
            self.fail(member, f"did not take the weights: {error}")
        else:
            member.version, member.strikes = version, 0
            self._tell()

    async def _while_it_lives(self, member: Member, work: Awaitable[None]) -> None:
        """Awaits `work`. Raises WeightUpdateFailed when the server dies or hangs meanwhile."""
        update = asyncio.ensure_future(work)
        watch = asyncio.create_task(self._silence(member, member.client.reachable))
        try:
            await asyncio.wait({update, watch}, return_when=asyncio.FIRST_COMPLETED)
            if not update.done():
                raise WeightUpdateFailed(watch.result())
            update.result()
        finally:
            update.cancel()
            watch.cancel()
            await asyncio.wait({update, watch})

    async def _silence(self, member: Member, question: Callable[..., Awaitable[bool]]) -> str:
        """Waits until its process ended or it had no good answer for servers.hang_timeout_s; returns what it did."""
        patience = self._config.hang_timeout_s
        last = time.monotonic()
        while True:
            if member.dead:
                return member.process.ending()
            if await question(timeout_s=patience):
                last = time.monotonic()
            elif time.monotonic() - last >= patience and not member.dead:
                return f"has not answered for {patience:g} s (servers.hang_timeout_s)"
            await asyncio.sleep(_POLL_S)


async def _raise_of(task: asyncio.Task) -> None:
    """Waits for another's task, and raises what it raised."""
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()
