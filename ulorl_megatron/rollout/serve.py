"""`ulorl serve`: keeps one SGLang server, for a trainer on another machine that shares the run directory."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Optional

from ulorl_megatron.config.schema import Config
from ulorl_megatron.errors import UserError
from ulorl_megatron.launch import slurm
from ulorl_megatron.rollout import server as local
from ulorl_megatron.rollout.client import Endpoint
from ulorl_megatron.rollout.roll_call import Attendance, server_log

_ALL_INTERFACES = "0.0.0.0"
_GRACE_S = 1.0  # it has nothing to save
_POLL_S = 0.5
_LOOK_S = 5.0  # between two looks at a server that is ready


def serve(config: Config, number: int, host: Optional[str] = None) -> int:
    """Starts server `number` of the run and starts it again when it dies or hangs; until SIGTERM, SIGINT or SIGUSR2.

    host: the name by which the trainer reaches this machine; default: the node's. Raises UserError, with the end of
    its log, when the server ends by itself at its first start, and when it failed more than servers.max_restarts times.
    """
    port = _port(config, number)
    run_dir = Path(config.run.dir).absolute()
    log = server_log(run_dir, number)
    url = f"http://{host or slurm.node_name()}:{port}"
    server = local.LocalServer(local.command(config, number, port, _ALL_INTERFACES), url, log)
    cards = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    print(f"server {number}: {url}, GPUs {cards}, log {log}", flush=True)
    with Attendance(run_dir, number, url, log) as attendance:
        try:
            asyncio.run(_Watch(config, server, attendance).until_told())
        finally:
            server.stop(_GRACE_S)
    return 0


def _port(config: Config, number: int) -> int:
    if config.servers.port:
        (port,) = local.choose_ports(config.servers.port + number, 1)
    elif "SLURM_JOB_ID" in os.environ:
        with slurm.bind_port(number) as bound:
            port = bound.getsockname()[1]
    else:
        (port,) = local.choose_ports(0, 1)
    return port


class _Watch:
    """Looks after `server` and answers calls while it is ready."""

    def __init__(self, config: Config, server: local.LocalServer, attendance: Attendance):
        self._config = config.servers
        self._server = server
        self._attendance = attendance
        self._endpoint = Endpoint(server.url)
        self._restarts = 0

    async def until_told(self) -> None:
        told = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            loop.add_signal_handler(number, told.set)
        loop.add_signal_handler(signal.SIGUSR1, lambda: None)  # for the trainer; Slurm may tell everybody
        self._server.start()
        keeping = asyncio.create_task(self._keep())
        waiting = asyncio.create_task(told.wait())
        try:
            await asyncio.wait({keeping, waiting}, return_when=asyncio.FIRST_COMPLETED)
            if keeping.done():
                keeping.result()
        finally:
            keeping.cancel()
            waiting.cancel()
            await self._endpoint.close()

    async def _keep(self) -> None:
        while True:
            fault = await self._until_ready() or await self._until_it_fails()
            if self._restarts >= self._config.max_restarts:
                raise UserError(
                    f"the server at {self._server.url} {fault}, after {self._restarts} restarts "
                    f"(servers.max_restarts). The last lines of {self._server.log}:\n{self._server.log_tail()}"
                )
            self._restarts += 1
            print(f"{self._server.url} {fault}; started again ({self._restarts})", flush=True)
            self._server.kill()
            self._server.start()

    async def _until_ready(self) -> Optional[str]:
        """None once it made a token; else what is wrong. Raises UserError if it ends by itself at its first start."""
        deadline = time.monotonic() + self._config.start_timeout_s
        while not await self._endpoint.healthy(timeout_s=_LOOK_S):
            if not self._server.alive():
                if not self._restarts and self._server.returncode > 0:
                    self._server.check_alive()
                return self._server.ending()
            if time.monotonic() > deadline:
                return f"is not ready after {self._config.start_timeout_s:g} s (servers.start_timeout_s)"
            await asyncio.sleep(_POLL_S)
        print(f"{self._server.url} is ready", flush=True)
        return None

    async def _until_it_fails(self) -> str:
        patience = self._config.hang_timeout_s
        last = time.monotonic()
        while True:
            self._attendance.answer()
            if not self._server.alive():
                return self._server.ending()
            if time.monotonic() - last > _LOOK_S:
                if await self._endpoint.reachable(timeout_s=patience):
                    last = time.monotonic()
                elif time.monotonic() - last > patience:
                    return f"has not answered for {patience:g} s (servers.hang_timeout_s)"
            await asyncio.sleep(_POLL_S)
