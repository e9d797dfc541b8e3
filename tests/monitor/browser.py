"""A page in headless Chromium, spoken to by its DevTools protocol."""

import json
import subprocess
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, AsyncIterator

import aiohttp

_FLAGS = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]


class Page:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self._socket = socket
        self._calls = 0

    async def call(self, method: str, **parameters: Any) -> dict:
        self._calls += 1
        await self._socket.send_json({"id": self._calls, "method": method, "params": parameters})
        async for message in self._socket:
            answer = json.loads(message.data)
            if answer.get("id") == self._calls:
                return answer["result"]
        raise ConnectionError("the browser ended")

    async def evaluate(self, expression: str) -> Any:
        """The (JSON) value of a JavaScript expression."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"].get("value")


@asynccontextmanager
async def open_page(chromium: str, profile: Path) -> AsyncIterator[Page]:
    process = subprocess.Popen(
        [chromium, *_FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        address = next(line.split()[-1] for line in process.stderr if "DevTools listening" in line)
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{address.split('/')[2]}/json/list") as answer:
                target = (await answer.json())[0]["webSocketDebuggerUrl"]
            async with session.ws_connect(target, max_msg_size=0) as socket:
                yield Page(socket)
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
