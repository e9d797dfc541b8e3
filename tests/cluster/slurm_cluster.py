"""A real Slurm on this machine: munged, slurmctld and a slurmd a node, each with GPUs that are links to /dev/null.

As root every node has a host name and an address of its own, so what runs there finds the others as on a real cluster.
Without root all nodes share this host's name. Needs Debian's slurmctld, slurmd, slurm-client and munge.
"""

import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Callable, Dict, List

from ulorl_megatron.launch.process import die_with_parent

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
PATH = f"{os.environ['PATH']}:/usr/sbin"
GPUS = 8

_CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=64
SlurmdParameters=config_overrides
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=2,bf_interval=2,sched_min_interval=0
ReturnToService=2
SlurmdTimeout=60
InactiveLimit=0
KillWait=10
MinJobAge=3600
JobRequeue=1
MailProg=/bin/true
GresTypes=gpu
"""

_OWN_NAME = (
    'hostname "$1"; mount --bind "$2/hosts" /etc/hosts; mount --bind "$2/nsswitch.conf" /etc/nsswitch.conf; '
    'shift 2; exec "$@"'
)


class Cluster:
    """`nodes` nodes n0, n1, ... of 64 CPUs and 8 GPUs, in partition gpu. Use it as a context manager."""

    def __init__(self, nodes: int):
        self._folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))  # unix sockets need a short path
        self._nodes = [f"n{i}" for i in range(nodes)]
        self._daemons: List[subprocess.Popen] = []
        self._named = subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True).returncode == 0
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "SBATCH", "SRUN"))}
        self.env: Dict[str, str] = {**kept, "SLURM_CONF": str(self._folder / "slurm.conf"), "PATH": PATH}

    def __enter__(self) -> "Cluster":
        try:
            self._write_files()
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception) -> None:
        if len(self._daemons) > 1:
            subprocess.run(["scancel", f"--user={os.getuid()}"], env=self.env, timeout=20)
            wait_until(lambda: not self.run("squeue", "-h").strip(), 60, "jobs to end")
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            daemon.wait(20)
        shutil.rmtree(self._folder)

    def _write_files(self) -> None:
        folder = self._folder
        folder.chmod(0o755)
        (folder / "state").mkdir()
        (folder / "dev").mkdir()
        for i in range(GPUS):
            (folder / "dev" / f"nvidia{i}").symlink_to("/dev/null")
        host, ports = socket.gethostname().partition(".")[0], _free_ports(len(self._nodes) + 1)
        addresses = [f"127.0.77.{10 + i}" if self._named else "127.0.0.1" for i in range(len(self._nodes))]
        lines = [_CONFIG.format(host=host, port=ports[0], user=_user(), folder=folder)]
        for node, address, port in zip(self._nodes, addresses, ports[1:], strict=True):
            (folder / "spool" / node).mkdir(parents=True)
            lines.append(
                f"NodeName={node} NodeHostname={node if self._named else host} NodeAddr={address} Port={port} "
                f"CPUs=64 RealMemory=65536 Gres=gpu:{GPUS} State=UNKNOWN"
            )
        lines.append("PartitionName=gpu Nodes=ALL Default=YES MaxTime=UNLIMITED DefaultTime=10 State=UP\n")
        (folder / "slurm.conf").write_text("\n".join(lines))
        (folder / "gres.conf").write_text(f"AutoDetect=off\nName=gpu File={folder}/dev/nvidia[0-{GPUS - 1}]\n")
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")
        names = [f"{a} {n}\n" for a, n in zip(addresses, self._nodes, strict=True)]
        (folder / "hosts").write_text("".join([f"127.0.0.1 localhost {host}\n", *names]))
        order = Path("/etc/nsswitch.conf").read_text()
        (folder / "nsswitch.conf").write_text(re.sub(r"(?m)^hosts:.*", "hosts: files", order))
        key = folder / "munge.key"
        key.touch(0o600)
        key.write_bytes(secrets.token_bytes(1024))

    def _start(self) -> None:
        folder, config = self._folder, self.env["SLURM_CONF"]
        files = {"key-file": "munge.key", "socket": "munge.sock", "pid-file": "munged.pid", "seed-file": "munged.seed"}
        self._daemon(
            *("munged", "--force", "--foreground", f"--log-file={folder}/munged.log"),
            *(f"--{name}={folder / file}" for name, file in files.items()),
        )
        wait_until((folder / "munge.sock").exists, 20, "munged")
        self._daemon("slurmctld", "-D", "-c", "-f", config)
        for node in self._nodes:
            own = ("unshare", "--uts", "--mount", "sh", "-c", _OWN_NAME, "sh", node, str(folder))
            self._daemon(*(own if self._named else ()), "slurmd", "-D", "-N", node, "-f", config)
        idle = ["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"]
        wait_until(lambda: len(self.run(*idle, check=False).split()) == len(self._nodes), 60, "idle nodes")

    def _daemon(self, *command: str) -> None:
        with (self._folder / "daemons.out").open("ab") as output:
            self._daemons.append(
                subprocess.Popen(
                    command,
                    env=self.env,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    preexec_fn=die_with_parent,
                )
            )

    def run(self, *command: object, check: bool = True, **settings) -> str:
        """What a command, of Slurm mostly, prints."""
        done = subprocess.run(
            [str(part) for part in command], env=self.env, capture_output=True, text=True, timeout=60, **settings
        )
        assert not check or done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def submit(self, folder: Path, *arguments: object, **environment: str) -> "Job":
        """sbatch, from `folder`."""
        command = ["sbatch", "--parsable", *map(str, arguments)]
        done = subprocess.run(
            command, env=self.env | environment, cwd=folder, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return Job(self, done.stdout.strip().split(";")[0], folder)


class Job:
    """One job, whose output lies in `folder`."""

    def __init__(self, cluster: Cluster, number: str, folder: Path):
        self.number = number
        self._cluster = cluster
        self._folder = folder

    def info(self) -> Dict[str, str]:
        """`scontrol show job`: of a het job its first component."""
        shown = self._cluster.run("scontrol", "show", "job", "-o", self.number).splitlines()[0]
        return dict(re.findall(r"(\w+)=(\S*)", shown))

    def output(self) -> str:
        """What it and its steps have printed up to now."""
        (file,) = [*self._folder.glob(f"*-{self.number}.out"), None][:1]
        return file.read_text() if file is not None else ""

    def wait_for(self, text: str, timeout_s: float = 240.0) -> None:
        """Until its output holds `text`; fails with the output if it ends before, or the time does."""

        def there() -> bool:
            ended = self.info()["JobState"] not in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "CONFIGURING")
            found = text in self.output()
            assert found or not ended, f"{text!r} did not come: {self.info()}\n{self.output()}"
            return found

        wait_until(there, timeout_s, text, self.output)

    def wait(self, state: str = "COMPLETED", timeout_s: float = 240.0) -> str:
        """Until it is in `state`; its output."""

        def there() -> bool:
            now = self.info()["JobState"]
            assert now in (state, "PENDING", "RUNNING", "COMPLETING"), f"{self.info()}\n{self.output()}"
            return now == state

        wait_until(there, timeout_s, state, self.output)
        return self.output()

    def signal_script(self, number: signal.Signals) -> None:
        """What --signal=B: does before the time limit."""
        self._cluster.run("scancel", "--batch", f"--signal={number.name}", self.number)


def wait_until(holds: Callable[[], bool], timeout_s: float, what: str, told: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}\n{told()}"
        time.sleep(0.2)


def _free_ports(count: int) -> List[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _user() -> str:
    return subprocess.run(["id", "-un"], capture_output=True, text=True, check=True).stdout.strip()
