"""One rank of a launch: computes every case of its world size, each in a forked process.

python -m tests.parallel.policy_worker MODELS OUTPUT

The process groups of a layout leave dozens of gloo threads behind, also when they are destroyed; forking leaves them
with the case, and spares it the imports.
"""

import os
import socket
import sys
import time
import traceback
from pathlib import Path

import torch

from checkpoint_tools.publish import write_atomically
from tests.parallel.layouts import CASES, Case, compute
from ulorl_megatron.launch.ranks import Ranks


def main() -> None:
    models, output = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    for case in CASES[int(os.environ["WORLD_SIZE"])]:
        child = os.fork()
        if child == 0:
            try:
                run(case, models, output)
                os._exit(0)
            finally:
                traceback.print_exc()
                os._exit(1)
        if os.waitpid(child, 0)[1]:
            sys.exit(f"{case.name} failed")


def run(case: Case, models: Path, output: Path) -> None:
    os.environ["MASTER_PORT"] = str(port_of(case, output))
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # rank 0 hosts the store, not the launcher
    with Ranks() as ranks:
        torch.save(compute(models, output / "run", case), output / f"{case.name}-{ranks.rank}.pt")


def port_of(case: Case, output: Path) -> int:
    """A port of this case's own: a rank that is ahead must not meet the case before."""
    file = output / f"{case.name}.port"
    if os.environ["RANK"] == "0":
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            write_atomically(file, str(probe.getsockname()[1]).encode())
    while not file.exists():
        time.sleep(0.01)
    return int(file.read_text())


if __name__ == "__main__":
    main()
