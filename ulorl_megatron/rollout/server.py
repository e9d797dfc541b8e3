"""An SGLang server process on this machine: started, watched, stopped."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Dict, List, Optional

import torch

from ulorl_megatron.config.positions import changed_fields, context_length
from ulorl_megatron.config.schema import Config
from ulorl_megatron.errors import UserError
from ulorl_megatron.launch.process import die_with_parent
from ulorl_megatron.rollout import cpu

HOST = "127.0.0.1"
LOG_TAIL_LINES = 20
_KILL_S = 10.0  # a process in a driver call that hangs does not even end by SIGKILL

# Below the ephemeral range of Linux (32768 on): the server binds its port a minute after it was chosen, and
# by then an outgoing connection of any process may have taken an ephemeral one.
_FREE_PORTS = (20000, 32000)
_PORT_DRAWS = 100

# Variables of a trainer rank that would make the server look for the trainer's process group.
_RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def choose_ports(first: int, count: int) -> List[int]:
    """`count` neighbouring ports that are free now, from `first` on, or from anywhere if it is 0.

    All are held at once while choosing (sglang#7418). Raises UserError naming the port in use.
    """
    if first:
        return _hold(first, count)
    for _ in range(_PORT_DRAWS):
        with suppress(UserError):
            return _hold(random.SystemRandom().randrange(*_FREE_PORTS, count), count)
    raise UserError(f"servers.port: no {count} neighbouring free ports in {_FREE_PORTS}; set servers.port yourself")


def _hold(first: int, count: int) -> List[int]:
    with ExitStack() as held:
        for port in range(first, first + count):
            sock = held.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                sock.bind((HOST, port))
            except OSError as error:
                raise UserError(
                    f"servers.port: port {port} on {HOST} cannot be used ({error.strerror}); "
                    "free it, choose another, or set 0 to take free ones"
                ) from error
    return list(range(first, first + count))


def command(config: Config, index: int, port: int, host: str = HOST) -> List[str]:
    """The command line of server `index`: weight version 0 is model.path as it is. host: the address it listens on."""
    positions = context_length(config)
    changed = changed_fields(config.model)
    return [
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", config.model.path),
        *("--dtype", config.model.dtype.value),
        *("--host", host),
        *("--port", str(port)),
        *("--context-length", str(positions)),
        *(("--json-model-override-args", json.dumps(changed)) if changed else ()),
        *("--random-seed", str(config.run.seed + index)),
        *("--weight-version", "0"),
        "--skip-tokenizer-init",  # prompts and responses travel as ids
        *(() if torch.cuda.is_available() else cpu.flags(positions)),
        *config.servers.extra_args,
    ]


def environment() -> Dict[str, str]:
    """This process's environment without what makes it a rank; on a CPU with the stand-ins."""
    env = {k: v for k, v in os.environ.items() if k not in _RANK_VARIABLES and not k.startswith("TORCHELASTIC_")}
    if not torch.cuda.is_available():
        env.update(cpu.environment())
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(cpu.STUBS), env.get("PYTHONPATH")]))
        env.setdefault("OMP_NUM_THREADS", "1")
    return env


def log_tail(log: Path) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])


class LocalServer:
    """One server process and its process group.

    It dies with the thread that called start(), even by kill -9: call start() from one that lives until stop().
    """

    def __init__(self, command: List[str], url: str, log: Path):
        self.url = url
        self.log = log
        self._command = command
        self._process: Optional[subprocess.Popen] = None

    def start(self) -> None:
        """Starts the process and returns at once; readiness is asked over HTTP."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                self._command,
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def returncode(self) -> Optional[int]:
        """None while it runs; negative: the signal that ended it."""
        assert self._process is not None, "not started"
        return self._process.poll()

    def ending(self) -> str:
        return f"ended with code {self.returncode}"

    def check_alive(self) -> None:
        """Raises UserError with the last lines of the log if the process has ended."""
        if not self.alive():
            raise UserError(
                f"the server at {self.url} {self.ending()}. The last lines of {self.log}:\n{self.log_tail()}"
            )

    def log_tail(self) -> str:
        return log_tail(self.log)

    def stop(self, grace_s: float = 5.0) -> None:
        """SIGTERM to the process, then SIGKILL to what is left of its group. Nothing if it never ran."""
        if self._process is None:
            return
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):  # the group is killed below
            self._process.wait(grace_s)
        with suppress(subprocess.TimeoutExpired):  # it ends once its driver lets it; nobody waits for that
            self.kill()

    def kill(self) -> None:
        """SIGKILL to its whole group. Raises subprocess.TimeoutExpired if even that does not end it."""
        with suppress(ProcessLookupError):  # the whole group is gone already
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(_KILL_S)
