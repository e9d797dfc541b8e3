"""The job scripts on a real Slurm: accepted, split as they say, tried again. The command is a stand-in here."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.slurm_cluster import Job

SLURM = Path(__file__).parents[2] / "slurm"
SCRIPTS = sorted(SLURM.glob("*.sbatch"))
TWO_PARTS = {"train_het.sbatch"}
STAND_IN = str(Path(__file__).parent / "stand_in.sh")
LINE = re.compile(r"^(\w+) host=(\w+) task=(\d+)/(\d+) gpus=([\d,]*) given=(.*)$", re.MULTILINE)


@pytest.fixture
def submit(cluster, tmp_path):
    """A job of the script, with the stand-in, submitted from a folder of its own."""

    def submit(script, *arguments, **environment):
        options = [argument for argument in arguments if argument.startswith("--") or argument == ":"]
        rest = [argument for argument in arguments if argument not in options]
        environment |= {"ULORL_PYTHON": STAND_IN, "RUN": str(tmp_path / "run")}
        return cluster.submit(tmp_path, *options, SLURM / script, *rest, **environment)

    return submit


@pytest.fixture(scope="module")
def failing(cluster, tmp_path_factory):
    """(job, run directory) of a trainer that always fails; begun early, since Slurm waits before it starts it again."""
    folder = tmp_path_factory.mktemp("failing")
    small = ["--nodelist=n7", "--nodes=1", "--gpus-per-node=2", "--ntasks-per-node=2"]  # out of the others' way
    environment = {"ULORL_PYTHON": STAND_IN, "RUN": str(folder / "run"), "ROLLOUT_GPUS": "1", "TRAIN_CODE": "3"}
    return cluster.submit(folder, *small, SLURM / "train.sbatch", "d.yaml", **environment), folder / "run"


def lines(output, command):
    """(host, task, of how many, GPUs, arguments) of each time that the stand-in ran as `command`, by task."""
    found = [line[1:] for line in LINE.findall(output) if line[0] == command]
    return sorted(found, key=lambda line: int(line[1]))


def test_shellcheck_has_nothing_to_say():
    shellcheck = Path(sys.executable).with_name("shellcheck")
    files = [*SCRIPTS, SLURM / "lib.sh", SLURM / "site.env.example", STAND_IN]
    done = subprocess.run([shellcheck, *files], cwd=SLURM, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_slurm_accepts_every_script_with_options_of_a_site(cluster, failing, tmp_path):
    site = {"SBATCH_ACCOUNT": "project", "SBATCH_PARTITION": "gpu", "SBATCH_QOS": "normal"}
    assert len(SCRIPTS) == 6
    for script in SCRIPTS:
        options = ["--account=project", "--partition=gpu", "--comment=ours"]
        both = [*options, ":", *options] if script.name in TWO_PARTS else options
        for given, environment in ((both, {}), ([], site)):
            done = subprocess.run(
                ["sbatch", "--test-only", *given, script, "config.yaml"],
                env=cluster.env | environment,
                cwd=tmp_path,
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0 and "to start at" in done.stderr, f"{script.name}: {done.stderr}"


def test_more_gpus_than_a_node_has_are_refused(cluster, tmp_path):
    done = subprocess.run(
        ["sbatch", "--test-only", "--gpus-per-node=9", SLURM / "train.sbatch", "config.yaml"],
        env=cluster.env,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "Requested node configuration is not available" in done.stderr


def test_components_of_a_het_job(submit):
    small = ["--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "--cpus-per-task=1"]
    servers = ["--nodes=1", "--ntasks-per-node=2", "--gpus-per-node=8", "--cpus-per-task=1"]
    job = submit("train_het.sbatch", *small, ":", *servers, "my.yaml", "run.total_steps=2")
    output = job.wait()
    ranks, serving = lines(output, "train"), lines(output, "serve")
    assert [rank[1:4] for rank in ranks] == [(str(i), "4", "0,1") for i in range(4)]
    assert [server[1:4] for server in serving] == [("0", "2", "0,1,2,3"), ("1", "2", "4,5,6,7")]
    assert ranks[0][0] == ranks[1][0] != ranks[2][0] == ranks[3][0]
    assert serving[0][0] == serving[1][0] not in {rank[0] for rank in ranks}
    settings = "my.yaml run.total_steps=2 run.processes=4 servers.announced=2 servers.urls=[]"
    assert {line[4] for line in [*ranks, *serving]} == {settings}
    assert "4 ranks on n[0-1], 2 servers on n2" in output and f"project {SLURM.parent}" in output


def test_one_allocation_split_by_nodes_and_by_gpus(submit):
    small = ["--ntasks-per-node=2", "--gpus-per-node=4", "--cpus-per-task=1"]
    by_nodes = submit("train.sbatch", "--nodes=3", *small, "a.yaml", ROLLOUT_NODES="1", SERVERS_PER_NODE="2")
    by_gpus = submit("train.sbatch", "--nodes=1", *small[1:], "--ntasks-per-node=4", "b.yaml", ROLLOUT_GPUS="2")
    ranks, serving = (lines(by_nodes.wait(), command) for command in ("train", "serve"))
    assert [rank[1:4] for rank in ranks] == [(str(i), "4", "0,1,2,3") for i in range(4)]
    assert [server[1:4] for server in serving] == [("0", "2", "0,1"), ("1", "2", "2,3")]
    assert not {rank[0] for rank in ranks} & {server[0] for server in serving}
    ranks, serving = (lines(by_gpus.wait(), command) for command in ("train", "serve"))
    seen = {*ranks[0][3].split(","), *serving[0][3].split(",")}
    assert [rank[1:3] for rank in ranks] == [("0", "2"), ("1", "2")] and len(serving) == 1
    assert ranks[0][3] == ranks[1][3] and len(seen) == 4, "neither sees the other's GPUs"


SITE = """
PATH={folder}:$PATH
MODULES="cuda nccl"
module() {{ echo "module $*"; }}
CONTAINER=/images/ulorl.sif
CONTAINER_MOUNTS=/data:/data
"""
APPTAINER = """#!/bin/bash
echo "apptainer ${*:1:5}" >&2
exec "${@:6}"
"""


def test_a_sweep_takes_one_configuration_each_in_the_container_of_the_site(submit, cluster, tmp_path):
    (tmp_path / "site").write_text(SITE.format(folder=tmp_path))
    (tmp_path / "apptainer").write_text(APPTAINER)
    (tmp_path / "apptainer").chmod(0o755)
    options = ["--array=1", "--gpus-per-node=2"]
    job = submit("sweep.sbatch", *options, "a.yaml", "b.yaml", ROLLOUT_GPUS="1", ULORL_SITE=str(tmp_path / "site"))
    output = Job(cluster, f"{job.number}_1", tmp_path).wait()
    assert [line[4].split()[0] for line in lines(output, "train")] == ["b.yaml"]
    assert "module load cuda nccl" in output
    mounts = f"/data:/data,{SLURM.parent}:{SLURM.parent}"
    run = f"apptainer exec --nv --bind {mounts} /images/ulorl.sif\n"
    assert output.count(run) == 3, "the configuration, the server, the trainer"


def test_servers_by_themselves_are_numbered_after_the_first(submit, cluster):
    job = submit("serve.sbatch", "--ntasks-per-node=2", "--cpus-per-task=1", "c.yaml", FIRST_SERVER="4")
    job.wait_for("task=1/2")
    cluster.run("scancel", job.number)
    serving = lines(job.wait("CANCELLED"), "serve")
    assert [server[1:] for server in serving] == [
        ("0", "2", "0,1,2,3", "c.yaml --number 4"),
        ("1", "2", "4,5,6,7", "c.yaml --number 4"),
    ]


def test_the_third_failure_of_one_way_is_the_last(failing):
    job, run = failing
    output = job.wait("FAILED")
    assert job.info()["Restarts"] == "2" and job.info()["ExitCode"] == "3:0"
    assert output.count("the trainer ended with code 3") == 3 and output.count("queued again") == 2
    assert "failed three times in a row: code 3 after the start" in output
    assert (run / "failures").read_text() == "3 code 3 after the start\n"
