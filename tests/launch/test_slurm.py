"""A rank's place from what Slurm says, and how the ranks meet. tests/cluster does it on a real Slurm."""

import os
import pty
from contextlib import contextmanager

import pytest
from torch.distributed import TCPStore

from ulorl_megatron.errors import UserError
from ulorl_megatron.launch import slurm

TASK = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "1",
    "SLURM_PROCID": "10",
    "SLURM_LOCALID": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "20",
    "SLURM_STEP_TASKS_PER_NODE": "8(x2),4",
    "SLURMD_NODENAME": "localhost",
}


def place(**changes):
    environment = TASK | changes
    slurm.take_place(environment)
    return [environment[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]


@pytest.mark.parametrize(
    ("cards", "local_rank"),
    [(None, "2"), ("", "2"), ("0,1,2,3,4,5,6,7", "2"), ("5", "0")],
    ids=["no GPU", "none", "all of the node", "its own"],
)
def test_place(cards, local_rank):
    changes = {} if cards is None else {"CUDA_VISIBLE_DEVICES": cards}
    assert place(**changes) == ["10", "20", local_rank, "8"]


def test_tasks_that_share_gpus_are_refused():
    with pytest.raises(UserError, match="8 tasks of this step share 4 GPUs"):
        place(CUDA_VISIBLE_DEVICES="0,1,2,3")
    assert place(SLURM_NODEID="2", CUDA_VISIBLE_DEVICES="0,1,2,3") == ["10", "20", "2", "4"]


@contextmanager
def stdin(descriptor):
    saved = os.dup(0)
    os.dup2(descriptor, 0)
    try:
        yield
    finally:
        os.dup2(saved, 0)
        os.close(saved)


def test_only_one_of_several_tasks_without_a_terminal_is_a_rank():
    batch_script = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "16"}
    parent, terminal = pty.openpty()
    reader, writer = os.pipe()
    with stdin(reader):
        assert slurm.is_task(TASK)
        assert not slurm.is_task(batch_script)
        assert not slurm.is_task(batch_script | {"SLURM_STEP_NUM_TASKS": "1"})
    with stdin(terminal):
        assert not slurm.is_task(TASK), "a shell of srun --pty"
    for descriptor in (parent, terminal, reader, writer):
        os.close(descriptor)


def test_ports_follow_from_the_job_and_are_free():  # sglang#7418
    with slurm.bind_port(1, TASK) as first, slurm.bind_port(2, TASK) as other:
        first.listen()
        with slurm.bind_port(1, TASK) as second:
            ports = [bound.getsockname()[1] for bound in (first, second, other)]
    assert ports[2] == ports[0] + 1 and ports[1] == ports[0] + 64, "the next is no other server's"
    with slurm.bind_port(1, TASK) as again:
        assert again.getsockname()[1] == ports[0]


def test_the_ranks_of_a_start_meet_at_the_first(tmp_path):
    first, other = TASK | {"SLURM_PROCID": "0"}, TASK
    (tmp_path / "meetings").mkdir()
    (tmp_path / "meetings" / "123456.0.1").write_text("elsewhere 1")  # of this very step, before a requeue
    again = {"SLURM_RESTART_COUNT": "1"}
    with slurm.meeting(tmp_path, first | again) as here, slurm.meeting(tmp_path, other | again) as there:
        assert here == there and here["MASTER_ADDR"] == "localhost"
        client = TCPStore(there["MASTER_ADDR"], int(there["MASTER_PORT"]), is_master=False, wait_for_workers=False)
        client.set("word", "heard")
        assert client.get("word") == b"heard"
    assert not (tmp_path / "meetings" / "123456.1.1").exists()


def test_a_first_rank_that_does_not_come(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "_MEETING_S", 0.1)
    with pytest.raises(UserError, match="the first rank did not write .*123456.0.1"), slurm.meeting(tmp_path, TASK):
        pass
