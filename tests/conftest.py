"""One real SGLang server for the whole session, serving a tiny random Qwen3-MoE in float32; the quickstart's task."""

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.servers.support import EXAMPLE, run_python
from tests.tiny_models import tiny_model
from ulorl_megatron.config.schema import Config, Dtype
from ulorl_megatron.rollout.served_model import ServedModel
from ulorl_megatron.rollout.server_pool import ServerPool


def tiny_config(run_dir: Path, model_path: Path) -> Config:
    """A configuration in which a sample has 4 segments of 16 tokens."""
    config = Config()
    config.run.dir = str(run_dir)
    config.model.path = str(model_path)
    config.model.dtype = Dtype.float32
    config.data.max_prompt_length = 64
    config.rollout.global_max_length = 64
    config.rollout.segment_count = 4
    config.rollout.request_timeout_s = 120.0
    return config


@dataclass(frozen=True)
class RunningServer:
    """url: of the server. model_path: the HF directory it was started with. log: its log file."""

    url: str
    model_path: Path
    log: Path

    def config(self, run_dir: Path) -> Config:
        """A configuration that uses this server; tests may change it."""
        config = tiny_config(run_dir, self.model_path)
        config.servers.urls = [self.url]
        return config


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny") / "moe", "moe")


@pytest.fixture(scope="session")
def sglang_server(tmp_path_factory, tiny_moe) -> RunningServer:
    """Started by the code under test. A new pool puts the weights back, whoever loaded others."""
    config = tiny_config(tmp_path_factory.mktemp("server"), tiny_moe)
    config.data.max_prompt_length = 960  # room for the tests of other packages
    pool = ServerPool(config, ServedModel.from_path(tiny_moe))
    pool.start()

    async def ready():
        await pool.wait_ready()
        for member in pool.members:
            await member.client.close()

    try:
        asyncio.run(ready())
        (member,) = pool.members
        yield RunningServer(member.client.url, tiny_moe, member.process.log)
    finally:
        pool.stop()


@pytest.fixture(scope="session")
def task(tmp_path_factory):
    """The quickstart's data and a model that solves some of it."""
    folder = tmp_path_factory.mktemp("quickstart") / "task"
    run_python(EXAMPLE / "make_task.py", folder)
    run_python(
        *(EXAMPLE / "warm_start.py", EXAMPLE / "config.yaml", "--steps", 120),
        *("--model", folder / "model", "--data", folder / "warmstart.jsonl", "--out", folder / "warm"),
    )
    return folder
