import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest

from tests.conftest import tiny_config
from ulorl_megatron.errors import UserError
from ulorl_megatron.rollout import cpu, server
from ulorl_megatron.rollout.served_model import ServedModel
from ulorl_megatron.rollout.server import LocalServer, choose_ports
from ulorl_megatron.rollout.server_pool import ServerPool


def test_a_port_in_use_is_named():
    with socket.socket() as taken:
        taken.bind((server.HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"servers.port: port {port} on .*Address already in use"):
            choose_ports(port, 1)


def test_ports_are_chosen_all_at_once():  # sglang#7418
    ports = choose_ports(0, 20)
    assert ports == list(range(ports[0], ports[0] + 20))
    assert ports[-1] < 32768, "an ephemeral port can be gone before the server binds it"


def test_a_first_port_gives_the_ones_after_it():
    (first, second) = choose_ports(0, 2)
    assert choose_ports(first, 2) == [first, second]


def test_the_rank_of_the_trainer_does_not_reach_the_server(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    env = server.environment()
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"} & set(env)
    assert env["PYTHONPATH"] == f"{cpu.STUBS}{os.pathsep}/elsewhere"


def test_with_cuda_no_stand_in_is_used(monkeypatch, tmp_path):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(server.torch.cuda, "is_available", lambda: True)
    assert "PYTHONPATH" not in server.environment()
    command = server.command(tiny_config(tmp_path, tmp_path), 0, 1)
    assert "cpu" not in command and "torch_native" not in command


def test_extra_arguments_come_last(tmp_path):
    config = tiny_config(tmp_path, tmp_path)
    config.servers.extra_args = ["--tp-size", "2"]
    assert server.command(config, 0, 30000)[-2:] == ["--tp-size", "2"]


def test_a_server_that_dies_at_start_shows_the_end_of_its_log(tmp_path, tiny_moe):
    config = tiny_config(tmp_path, tiny_moe)
    config.servers.extra_args = ["--no-such-flag"]
    pool = ServerPool(config, ServedModel.from_path(tiny_moe))
    for member in pool.members:  # the real one takes ten seconds to say so
        member.process._command = [
            sys.executable,
            "-c",
            "print('\\n' * 50 + 'no such flag'); raise SystemExit(2)",
        ]
    pool.start()

    async def wait():
        try:
            await pool.wait_ready()
        finally:
            await pool.close()

    with pytest.raises(UserError, match=r"ended with code 2.*server-0\.log:\n(\n|.)*no such flag") as error:
        asyncio.run(wait())
    assert len(str(error.value).splitlines()) == 1 + server.LOG_TAIL_LINES


def gone(pid: int) -> bool:
    """Whether process `pid` has ended (a zombie has)."""
    for _ in range(200):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                if stat.read().rsplit(")", 1)[1].split()[0] == "Z":
                    return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


STUBBORN = (
    "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
    "print(child.pid, flush=True); time.sleep(600)"
)


def child_of(process: LocalServer) -> int:
    for _ in range(200):
        text = process.log.read_text()
        if text.endswith("\n"):
            return int(text)
        time.sleep(0.05)
    raise AssertionError("the process did not start")


def test_stop_ends_the_whole_group_even_if_it_does_not_listen(tmp_path):
    process = LocalServer([sys.executable, "-c", STUBBORN], "http://x", tmp_path / "logs" / "server-0.log")
    process.start()
    child = child_of(process)
    assert process.alive()
    process.stop(grace_s=0.2)
    assert not process.alive() and gone(child)
    process.stop()


def test_kill_9_of_the_trainer_takes_its_server_along(tmp_path):
    log = tmp_path / "server-0.log"
    code = f"""
        import sys, time
        from pathlib import Path
        from ulorl_megatron.rollout.server import LocalServer
        sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
        server = LocalServer(sleep, "http://x", Path({str(log)!r}))
        server.start()
        print(server.pid, flush=True)
        time.sleep(600)
    """
    trainer = subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True)
    pid = int(trainer.stdout.readline())
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.wait()
    trainer.stdout.close()
    assert gone(pid)


def test_a_model_without_config_or_eos_is_named(tmp_path):
    with pytest.raises(UserError, match="has no config.json"):
        ServedModel.from_path(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 8}')
    with pytest.raises(UserError, match="no eos_token_id"):
        ServedModel.from_path(tmp_path)


def test_eos_ids_come_from_both_files(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 8, "eos_token_id": 3}')
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    assert ServedModel.from_path(tmp_path).stop_token_ids == {3, 5}
