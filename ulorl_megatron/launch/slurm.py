"""A task of a Slurm job step: its place among the ranks, how it finds the first one, and ports of the job's own."""

import os
import re
import socket
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Dict, Iterator, List, Mapping, MutableMapping

from checkpoint_tools.publish import write_atomically
from ulorl_megatron.errors import UserError

_PORTS = range(20000, 32000)  # below the ephemeral range of Linux
_PORTS_OF_A_JOB = 64
_STORE_PORT = _PORTS_OF_A_JOB - 1  # which of them; servers take the others by their number
_POLL_S = 0.1
_MEETING_S = 600.0


def is_task(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether srun started this process as one of several tasks, and so as a rank.

    A batch script is in no step; an interactive shell (salloc, srun --pty) is in a step of one task, or has a terminal.
    """
    return int(environment.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and not os.isatty(0)


def take_place(environment: MutableMapping[str, str] = os.environ) -> None:
    """Sets RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE of this task, as torchrun would.

    LOCAL_RANK is the index of the task's GPU among those it sees: 0 where Slurm shows each task only its own
    (--gpus-per-task=1), else its number on the node. Raises UserError if the tasks see several GPUs, but too few.
    """
    tasks = _tasks_of_nodes(environment["SLURM_STEP_TASKS_PER_NODE"])[int(environment["SLURM_NODEID"])]
    cards = [card for card in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if card]
    environment["RANK"] = environment["SLURM_PROCID"]
    environment["WORLD_SIZE"] = environment["SLURM_STEP_NUM_TASKS"]
    environment["LOCAL_RANK"] = "0" if len(cards) == 1 else environment["SLURM_LOCALID"]
    environment["LOCAL_WORLD_SIZE"] = str(tasks)
    if 1 < len(cards) < tasks:
        raise UserError(
            f"{node_name(environment)}: {tasks} tasks of this step share {len(cards)} GPUs (CUDA_VISIBLE_DEVICES "
            f"{','.join(cards)}); every rank needs one of its own, so take as many tasks a node as GPUs"
        )


def _tasks_of_nodes(text: str) -> List[int]:
    """ "8(x3),4" -> [8, 8, 8, 4]."""
    nodes: List[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        nodes += [int(count)] * int(times or 1)
    return nodes


def node_name(environment: Mapping[str, str] = os.environ) -> str:
    """The name by which other nodes find this one: Slurm's, or, where that is no host's name, its host's."""
    try:
        socket.getaddrinfo(environment["SLURMD_NODENAME"], None)
    except (KeyError, socket.gaierror):
        return socket.gethostname()
    return environment["SLURMD_NODENAME"]


def bind_port(number: int, environment: Mapping[str, str] = os.environ) -> socket.socket:
    """A socket bound, on all interfaces, to a port that follows from the job and `number`.

    If another process has it, the next of those that no other number of this job takes; so two tasks of a node that
    choose at the same time never choose the same (sglang#7418). Raises UserError if all are taken.
    """
    first = int(environment["SLURM_JOB_ID"]) * _PORTS_OF_A_JOB + number % _PORTS_OF_A_JOB
    tried = [_PORTS[(first + i) % len(_PORTS)] for i in range(0, len(_PORTS), _PORTS_OF_A_JOB)]
    for port in tried:
        bound = socket.socket()
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            bound.bind(("", port))
        except OSError:
            bound.close()
        else:
            return bound
    raise UserError(f"{node_name(environment)}: none of the ports {tried[0]}, {tried[1]}, ... is free")


@contextmanager
def meeting(run_dir: Path, environment: Mapping[str, str] = os.environ) -> Iterator[Dict[str, str]]:
    """MASTER_ADDR and MASTER_PORT of the store that the first rank opens here; it lasts as long as the block.

    The first rank says where it is in a file of the run directory, whose name no other start of a step has. Raises
    UserError if that file does not come.
    """
    step = (environment["SLURM_JOB_ID"], environment.get("SLURM_RESTART_COUNT", "0"), environment["SLURM_STEP_ID"])
    file = run_dir / "meetings" / ".".join(step)
    if environment["SLURM_PROCID"] != "0":
        yield _store_at(_wait_for(file, environment))
        return
    from torch.distributed import TCPStore

    with bind_port(_STORE_PORT, environment) as bound:
        bound.listen()
        port = bound.getsockname()[1]
        # The store takes this very socket over: nobody can take its port in between.
        store = TCPStore(
            "localhost", port, is_master=True, wait_for_workers=False, master_listen_fd=bound.detach(), use_libuv=False
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    address = f"{node_name(environment)} {port}"
    write_atomically(file, address.encode())
    try:
        yield _store_at(address)
    finally:
        file.unlink(missing_ok=True)
        del store


def _store_at(address: str) -> Dict[str, str]:
    host, port = address.split()
    return {"MASTER_ADDR": host, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "True"}


def _wait_for(file: Path, environment: Mapping[str, str]) -> str:
    deadline = time.monotonic() + _MEETING_S
    while time.monotonic() < deadline:
        if file.exists():
            return file.read_text()
        time.sleep(_POLL_S)
    raise UserError(
        f"{node_name(environment)}: the first rank did not write {file} within {_MEETING_S:g} s. Is run.dir on a file "
        "system that all nodes share?"
    )
