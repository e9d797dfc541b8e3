"""A judge that speaks the OpenAI protocol and answers by a script, for what no real model can be made to do."""

import re
from contextlib import asynccontextmanager
from typing import Any, AsyncIterator, Callable, Dict, List

from aiohttp import web
from aiohttp.test_utils import TestServer

from ulorl_megatron.config.schema import JudgeConfig

EQUIVALENT, DIFFERENT, UNKNOWN = (f'{{"verdict": "{word}"}}' for word in ("equivalent", "different", "unknown"))

_BLOCKS = re.compile(r"^\[begin (\w{16})\]\n(.*?)\n\[end \1\]$", re.DOTALL | re.MULTILINE)


def texts_of(prompt: str) -> List[str]:
    """Question, reference and candidate, as a reader sees them that trusts the marks."""
    return [text for _, text in _BLOCKS.findall(prompt)]


class ScriptedJudge:
    """script: (question, reference, candidate) -> reply. faults: HTTP statuses of the next answers, used up first.

    down: every answer is HTTP 503. prompts: of /chat/completions, probes (one token) left out. bodies: of all.
    """

    def __init__(self, script: Callable[[str, str, str], str] = lambda *texts: EQUIVALENT):
        self.script = script
        self.faults: List[int] = []
        self.down = False
        self.prompts: List[str] = []
        self.bodies: List[Dict[str, Any]] = []
        self.keys: List[str] = []
        self.at_once = self.most_at_once = 0

    @asynccontextmanager
    async def serve(self, **settings: Any) -> AsyncIterator[JudgeConfig]:
        """Yields the configuration of a judge that asks this server."""
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._complete)
        async with TestServer(app) as server:
            yield JudgeConfig(url=str(server.make_url("/v1")), **settings)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "scripted", "object": "model"}]})

    async def _complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.bodies.append(body)
        self.keys.append(request.headers.get("Authorization", ""))
        if self.down:
            return web.Response(status=503, text="loading")
        if body["max_tokens"] == 1:
            return _message(body, "yes")
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await self._reply(body)
        finally:
            self.at_once -= 1

    async def _reply(self, body: Dict[str, Any]) -> web.Response:
        prompt = body["messages"][0]["content"]
        self.prompts.append(prompt)
        if self.faults:
            return web.Response(status=self.faults.pop(0), text="scripted fault")
        return _message(body, self.script(*texts_of(prompt)))


def _message(body: Dict[str, Any], content: str) -> web.Response:
    message = {"role": "assistant", "content": content}
    return web.json_response(
        {"id": "1", "object": "chat.completion", "model": body["model"], "choices": [{"index": 0, "message": message}]}
    )
