"""Training jobs on a real Slurm: real Megatron-Core on ranks of two nodes, a real SGLang server on a third."""

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.cluster.slurm_cluster import wait_until
from tests.servers.support import command, records
from ulorl_megatron.rollout.sample import Status
from ulorl_megatron.rollout.store import PoolStore

SLURM = Path(__file__).parents[2] / "slurm"
SMALL = ["--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=1"]

pytestmark = pytest.mark.slow


@pytest.fixture
def submit(cluster, tmp_path, task):
    """A job that trains in tmp_path/run. options: of sbatch. settings: of the run."""

    def submit(script, options, *settings, **environment):
        arguments = command(task, tmp_path / "run", *settings)[4:]
        return cluster.submit(tmp_path, *options, SLURM / script, *arguments, **environment)

    return submit


def processes(job):
    """Those on this machine that the job's script and steps started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SLURM_JOB_ID") == job.number and "slurmstepd" not in process.name():
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def latest(run):
    return int((run / "checkpoints" / "latest").read_text().strip().removeprefix("step-"))


def trained(run):
    """Sample -> step in which it trained, from pools that hold together."""
    store = PoolStore(run / "pools.sqlite")
    counts, found = store.check_conservation(), store.trained()
    store.close()
    assert counts[Status.trained] == len(found)
    return found


def test_the_life_of_a_het_job(cluster, submit, tmp_path):
    """Time limit, a server that is killed, a node that goes down, scancel; one job, started three times."""
    run = tmp_path / "run"
    job = submit(
        "train_het.sbatch",
        ["--nodes=2", *SMALL, ":", "--nodes=1", *SMALL],
        *("run.total_steps=90", "checkpoint.every=80", "servers.hang_timeout_s=20"),
    )
    job.wait_for("step    3/90")
    assert "2 ranks on n[0-1], 1 servers on n2" in job.output()
    job.signal_script(signal.SIGUSR1)
    job.wait_for("queued again")
    assert "stopped, as asked, with a checkpoint" in job.output()
    assert "the trainer ended with code 75" in job.output()
    saved = latest(run)
    assert saved >= 3
    before = trained(run)
    assert before and max(before.values()) == saved

    job.wait_for(f"resuming {run} after step {saved}")
    job.wait_for(f"step {saved + 1:>4}/90")
    (group,) = {os.getpgid(p.pid) for p in processes(job) if "sglang.launch_server" in p.cmdline()}
    os.killpg(group, signal.SIGKILL)
    killed_at = len(job.output())
    job.wait_for("started again (1)")
    wait_until(lambda: re.search(r"is ready[^$]*\nstep ", job.output()[killed_at:]), 240, "a step", job.output)

    cluster.run("scontrol", "update", "nodename=n1", "state=down", "reason=test")
    wait_until(lambda: job.info()["Restarts"] == "2", 60, "Slurm to queue it again", job.output)
    cluster.run("scontrol", "update", "nodename=n1", "state=resume", check=False)  # it may be back by itself
    job.wait_for("start 3")
    third = job.output().index("start 3")
    wait_until(lambda: re.search(r"\nstep ", job.output()[third:]), 240, "a step", job.output)
    (resumed,) = re.findall(rf"resuming {run} after step (\d+)", job.output()[third:])
    assert int(resumed) >= saved  # the ranks on other nodes are told by TERM, and save if they can

    family = processes(job)
    assert len(family) >= 5  # the script, two steps, two ranks, a server
    begin = time.monotonic()
    cluster.run("scancel", job.number)
    assert psutil.wait_procs(family, timeout=20)[1] == [] and processes(job) == []
    assert time.monotonic() - begin < 15
    job.wait("CANCELLED")
    assert "queued again" not in job.output()[third:]

    after = trained(run)
    assert {i: step for i, step in after.items() if step <= saved} == before, "the same pools"
    done = [record["step"] for record in records(run)]
    assert done == list(range(1, len(done) + 1)) and len(done) > saved


def test_one_node_shared_by_trainer_and_server_then_tools(cluster, submit, tmp_path, task):
    job = submit(
        "train.sbatch",
        ["--nodes=1", "--ntasks-per-node=4", "--gpus-per-node=4", "--cpus-per-task=1"],
        "run.total_steps=3",
        ROLLOUT_GPUS="2",
    )
    output = job.wait()
    assert "2 ranks, 1 servers on 2 GPUs" in output and "the trainer ended with code 0" in output
    run = tmp_path / "run"
    assert [record["step"] for record in records(run)] == [1, 2, 3]
    assert trained(run) and latest(run) == 3
    assert not list((run / "meetings").iterdir())

    checkpoint, out = run / "checkpoints" / "step-000003", tmp_path / "hf"
    convert = cluster.submit(tmp_path, SLURM / "convert.sbatch", "megatron-to-hf", checkpoint, out)
    settings = ["evaluation.samples_per_prompt=2", "evaluation.max_prompts=4"]
    arguments = [*command(task, run, *settings)[4:], "--checkpoint", checkpoint]
    evaluate = cluster.submit(tmp_path, "--gpus-per-node=1", "--cpus-per-task=1", SLURM / "eval.sbatch", *arguments)
    convert.wait()
    assert (out / "config.json").exists() and list(out.glob("*.safetensors"))
    assert "step-000003" in evaluate.wait() and (run / "evaluation" / "results.json").exists()
