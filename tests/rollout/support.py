"""A server pool over stand-ins, shared by the tests of this folder."""

import asyncio
from contextlib import AsyncExitStack, nullcontext

from tests.conftest import tiny_config
from tests.fake_server import FakeServer
from ulorl_megatron.rollout.client import Sampling
from ulorl_megatron.rollout.server_pool import ServerPool

PROMPT = list(b"2+3=")
SAMPLING = Sampling(0.85)


def run_pool(model, tmp_path, work, *, servers=1, timeout_s=30.0, retries=3, kept=False, **settings):
    """`work(pool, fakes)` with a pool over fresh stand-ins that already hold version 0.

    kept: whether servers are watched and brought back. settings: of the servers section.
    """

    async def run():
        async with AsyncExitStack() as stack:
            fakes = [FakeServer() for _ in range(servers)]
            config = tiny_config(tmp_path, model.path)
            config.servers.urls = [await stack.enter_async_context(fake.serve()) for fake in fakes]
            config.rollout.request_timeout_s = timeout_s
            config.rollout.request_retries = retries
            for name, value in settings.items():
                assert hasattr(config.servers, name)
                setattr(config.servers, name, value)
            pool = ServerPool(config, model, backoff_s=0.001)
            stack.push_async_callback(pool.close)
            for member in pool.members:
                member.version = 0
            async with pool.kept() if kept else nullcontext():
                return await work(pool, fakes)

    return asyncio.run(run())
