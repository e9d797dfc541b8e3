"""A server that speaks the OpenAI protocol and answers by a script."""

from contextlib import contextmanager
from typing import Callable, Iterator, List

from aiohttp import web
from aiohttp.test_utils import TestServer

from ulorl_megatron.rollout.loop_thread import LoopThread


class ScriptedModel:
    """reply: prompt -> answer; asked: the prompts so far. faults: HTTP statuses of the next answers, used up first."""

    def __init__(self, reply: Callable[[str], str]):
        self.reply = reply
        self.asked: List[str] = []
        self.faults: List[int] = []

    @contextmanager
    def running(self) -> Iterator[str]:
        """Serves in a thread of its own; the URL."""
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._complete)
        with LoopThread() as loop:
            server = loop.run(_started(app))
            yield str(server.make_url("/v1"))
            loop.run(server.close())

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted"}]})

    async def _complete(self, request: web.Request) -> web.Response:
        prompt = (await request.json())["messages"][0]["content"]
        self.asked.append(prompt)
        if self.faults:
            return web.Response(status=self.faults.pop(0), text="scripted fault")
        return web.json_response({"choices": [{"message": {"content": self.reply(prompt)}}]})


async def _started(app: web.Application) -> TestServer:
    server = TestServer(app)
    await server.start_server()
    return server
