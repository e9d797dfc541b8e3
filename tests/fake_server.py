"""A small stand-in for an SGLang server, for faults that a real one cannot be made to show.

It is held to the contract tests of the real one (tests/servers/test_contract.py). Its next token is a
function of context and weights, so that segments continue the unbroken run. EOS needs a temperature above 0.
As a program (python fake_server.py PORT DELAY_S VERSION) it serves until it is killed; it starts in half a second.
"""

import asyncio
import sys
import zlib
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, AsyncIterator, Awaitable, Callable, Dict, List

from aiohttp import web
from aiohttp.test_utils import TestServer

# Takes a request of /generate and its sound answer, and returns what is sent instead.
Fault = Callable[[web.Request, dict], Awaitable[web.StreamResponse]]


class FakeServer:
    """faults: used up by the next /generate calls. requests: of /generate. calls: routes, in order.

    hung: set, no route answers, as a stopped process does. delay_s: mean seconds of a /generate.
    update_s: of loading weights.
    """

    def __init__(self, delay_s: float = 0.0) -> None:
        self.faults: List[Fault] = []
        self.requests: List[Dict[str, Any]] = []
        self.calls: List[str] = []
        self.version = "0"
        self.reported_version: str | None = None  # what /model_info says instead, if set
        self.paused = False
        self.hung = False
        self.delay_s = delay_s
        self.update_s = 0.0
        self._seen: set = set()  # contexts whose prefix is cached
        self._weights = b""

    def next_token(self, context: List[int], greedy: bool, eos: int) -> int:
        value = zlib.crc32(bytes(str(context), "ascii") + self._weights)
        return eos if value % 97 == 0 and not greedy else value % 256

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        """Yields the URL."""
        async with TestServer(self.application()) as server:
            yield str(server.make_url("")).rstrip("/")

    def application(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30, middlewares=[self._hang])
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/update_weights_from_disk", self._update)
        for route in ("/pause_generation", "/continue_generation", "/abort_request"):
            app.router.add_post(route, self._control)
        app.router.add_get("/health", self._health)
        app.router.add_get("/model_info", self._model_info)
        return app

    @web.middleware
    async def _hang(self, request: web.Request, handler: Callable) -> web.StreamResponse:
        while self.hung:
            await asyncio.sleep(0.02)
        return await handler(request)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        payload = await request.json()
        self.calls.append("/generate")
        self.requests.append(payload)
        params = payload["sampling_params"]
        context, tokens = list(payload["input_ids"]), []
        if self.delay_s:
            await asyncio.sleep(self.delay_s * (0.5 + zlib.crc32(bytes(str(context), "ascii")) % 100 / 100))
        while len(tokens) < params["max_new_tokens"]:
            greedy = params["temperature"] == 0
            tokens.append(self.next_token(context + tokens, greedy, eos=min(params["stop_token_ids"])))
            if tokens[-1] in params["stop_token_ids"]:
                break
        answer = self._answer(context, tokens, params["stop_token_ids"])
        if self.faults:
            return await self.faults.pop(0)(request, answer)
        return web.json_response(answer)

    def _answer(self, context: List[int], tokens: List[int], stop: List[int]) -> dict:
        eos = tokens[-1] in stop
        cached = max((len(c) for c in self._seen if list(c) == context[: len(c)]), default=0)
        self._seen.add(tuple(context + tokens[:-1]))
        return {
            "output_ids": tokens,
            "meta_info": {
                "finish_reason": {"type": "stop", "matched": tokens[-1]}
                if eos
                else {"type": "length", "length": len(tokens)},
                "cached_tokens": min(cached, len(context) - 1),
                "weight_version": self.version,
                "weight_versions": [{"version": self.version, "start": 0, "end": len(tokens)}],
                "output_token_logprobs": [[-(t % 7) / 7, t, None] for t in tokens],
            },
        }

    async def _update(self, request: web.Request) -> web.Response:
        self.calls.append("/update_weights_from_disk")
        payload = await request.json()
        await asyncio.sleep(self.update_s)
        config = Path(payload["model_path"]) / "config.json"
        if not config.is_file():
            return web.json_response({"success": False, "message": "no such model"}, status=400)
        self._weights = (Path(payload["model_path"]) / "model.safetensors").read_bytes()
        self.version = payload["weight_version"]
        self._seen.clear()
        return web.json_response({"success": True, "message": "ok"})

    async def _control(self, request: web.Request) -> web.Response:
        self.calls.append(request.path)
        self.paused = {"/pause_generation": True, "/continue_generation": False}.get(
            request.path, self.paused
        )
        return web.json_response({"success": True})

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.paused else 200)

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.reported_version or self.version})


def altered(change: Callable[[dict], None]) -> Fault:
    """A fault that sends the answer after `change` was made to it."""

    async def fault(request: web.Request, answer: dict) -> web.StreamResponse:
        change(answer)
        return web.json_response(answer)

    return fault


def status(code: int, body: str = "{}") -> Fault:
    async def fault(request: web.Request, answer: dict) -> web.StreamResponse:
        return web.Response(status=code, text=body)

    return fault


async def garbage(request: web.Request, answer: dict) -> web.StreamResponse:
    return web.Response(text="<html>a proxy's page</html>")


async def silence(request: web.Request, answer: dict) -> web.StreamResponse:
    await asyncio.sleep(3600)
    raise AssertionError("the client waited an hour")


async def cut(request: web.Request, answer: dict) -> web.StreamResponse:
    """The connection ends in the middle of the body."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"output_ids": [1, ')
    request.transport.abort()
    return response


def aborted_after(count: int, message: str = "Aborted") -> Fault:
    """The server aborts after `count` tokens, and says so with HTTP 200."""

    def change(answer: dict) -> None:
        meta = answer["meta_info"]
        answer["output_ids"] = answer["output_ids"][:count]
        kept = len(answer["output_ids"])
        meta["output_token_logprobs"] = meta["output_token_logprobs"][:kept]
        meta["weight_versions"][0]["end"] = kept
        meta["finish_reason"] = {"type": "abort", "message": message, "status_code": None, "err_type": None}

    return altered(change)


if __name__ == "__main__":
    fake = FakeServer(delay_s=float(sys.argv[2]))
    fake.version = sys.argv[3]
    web.run_app(fake.application(), host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None)
