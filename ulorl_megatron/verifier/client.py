"""A language model behind an OpenAI-compatible URL: it is asked prompt by prompt, and waited for when it is down."""

import asyncio
import json
import logging
import os
import time
from contextlib import suppress
from typing import Any, Dict, Optional

import aiohttp

from ulorl_megatron.config.schema import JudgeConfig
from ulorl_megatron.errors import UserError
from ulorl_megatron.verifier.interface import VerifierFailed

log = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 30.0
_MOST_OUTAGES = 10
_PROBE = "Say yes."
_TEXT_SHOWN = 300  # characters of an answer that is an error


class _Trouble(Exception):
    """One try failed, as it may again or not: no connection, too late, 5xx, too busy, an answer without sense."""


class _Rejected(Exception):
    """The server will not take this request (400, 413, 422)."""


class JudgeClient:
    """Use it inside one event loop, and close it there. backoff_s: pause after a first failure; it doubles.

    Raises UserError when the environment lacks the key that config.key_variable names.
    """

    def __init__(self, config: JudgeConfig, *, backoff_s: float = 0.5):
        self._config = config
        self._url = config.url.rstrip("/")
        self._backoff_s = backoff_s
        self._headers = {}
        if config.key_variable is not None:
            key = os.environ.get(config.key_variable)
            if not key:
                raise UserError(f"verifier.judge.key_variable: {config.key_variable} is not set in the environment")
            self._headers["Authorization"] = f"Bearer {key}"
        self._model = config.model
        self._session: Optional[aiohttp.ClientSession] = None
        self._slots = asyncio.Semaphore(config.concurrency)
        self._probing = asyncio.Lock()
        self._answered_at = self._back_at = 0.0  # of the last answer; of the end of the last outage

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def ready(self) -> None:
        """Waits until the judge answers, as `ask` does."""
        await self._until_up(time.monotonic())

    async def ask(self, prompt: str) -> str:
        """The reply to `prompt`.

        While the judge answers nobody, this waits: for config.hold_s seconds, then it raises UserError, as at once
        when key, model or URL are refused. Raises VerifierFailed when the judge answers others, but this prompt in
        none of config.retries + 1 tries; one during which the judge went down does not count among them, but ten
        such are enough: it may be the prompt that brings it down.
        """
        async with self._slots:
            failures = outages = 0
            while True:
                begin = time.monotonic()
                try:
                    return await self._complete(prompt, self._config.max_tokens)
                except _Rejected as error:
                    raise VerifierFailed(str(error)) from error
                except _Trouble as error:
                    await self._until_up(begin)
                    down = self._back_at > begin
                    failures, outages = failures + (not down), outages + down
                    log.warning("judge, try %d: %s", failures + outages, error)
                    if failures > self._config.retries or outages > _MOST_OUTAGES:
                        raise VerifierFailed(f"{failures + outages} tries: {error}") from error
                    await asyncio.sleep(self._pause(failures))

    async def _until_up(self, since: float) -> None:
        """Returns once the judge has answered anything after `since`; one of those that wait asks it."""
        async with self._probing:
            begin, tries, why = time.monotonic(), 0, "?"
            while self._answered_at < since:
                try:
                    await self._complete(_PROBE, 1)
                    break
                except _Rejected as error:
                    raise UserError(f"verifier.judge: it takes no request: {error}") from error
                except _Trouble as error:
                    why = str(error)
                left = self._config.hold_s - (time.monotonic() - begin)
                if left <= 0:
                    raise UserError(
                        f"the judge at {self._url} has not answered for {self._config.hold_s:g} s "
                        f"(verifier.judge.hold_s): {why}. Nothing was rewarded meanwhile, the pools are safe; when it "
                        "answers again the same command goes on"
                    )
                if not tries:
                    self._tell(f"warning: the judge at {self._url} does not answer ({why}); rewards wait for it")
                await asyncio.sleep(min(self._pause(tries), left))
                tries += 1
            if tries:
                self._back_at = time.monotonic()
                self._tell(f"the judge at {self._url} answers again after {time.monotonic() - begin:.0f} s")

    def _pause(self, failures: int) -> float:
        return min(self._backoff_s * 2 ** min(failures, 20), _LONGEST_PAUSE_S)

    def _tell(self, line: str) -> None:
        log.warning(line)
        print(line, flush=True)

    async def _complete(self, prompt: str, max_tokens: int) -> str:
        if self._model is None:
            listed = await self._request("GET", "/models")
            with suppress(LookupError, TypeError):
                self._model = listed["data"][0]["id"]
            if not isinstance(self._model, str):
                raise _Trouble(f"{self._url}/models lists no model; name one in verifier.judge.model")
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": self._config.temperature,
            "max_tokens": max_tokens,
        }
        answer = await self._request("POST", "/chat/completions", body)
        try:
            content = answer["choices"][0]["message"]["content"]
        except (LookupError, TypeError) as error:
            raise _Trouble(f"{self._url}: no message in {str(answer)[:_TEXT_SHOWN]!r}") from error
        self._answered_at = time.monotonic()
        return content if isinstance(content, str) else ""  # null: all of it went into thinking

    async def _request(self, method: str, route: str, body: Optional[Dict[str, Any]] = None) -> Any:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=self._config.timeout_s)
            connector = aiohttp.TCPConnector(limit=0)  # the slots bound it
            self._session = aiohttp.ClientSession(headers=self._headers, timeout=timeout, connector=connector)
        url = self._url + route
        try:
            async with self._session.request(method, url, json=body) as response:
                status, text = response.status, await response.text()
        except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError) as error:
            raise _Trouble(f"{url}: {str(error) or type(error).__name__}") from error
        if status >= 500 or status in (408, 429):
            raise _Trouble(f"{url}: HTTP {status}: {text[:_TEXT_SHOWN]}")
        if status in (400, 413, 422):
            raise _Rejected(f"{url}: HTTP {status}: {text[:_TEXT_SHOWN]}")
        if status != 200:
            raise UserError(
                f"verifier.judge: {url} answers HTTP {status}: {text[:_TEXT_SHOWN]}. Is verifier.judge.url right (it "
                "ends in /v1 for most servers), and model and key_variable?"
            )
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise _Trouble(f"{url}: no JSON: {text[:_TEXT_SHOWN]!r}") from error
