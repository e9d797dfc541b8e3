"""The HTTP protocol of one SGLang server. Tokens go in and out as ids, never as text."""

import asyncio
import math
import re
import uuid
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, Dict, List, Optional, Type

import aiohttp

from ulorl_megatron.rollout.served_model import ServedModel

_CONTROL_TIMEOUT_S = 60.0
_ABORT_AGAIN_S = 0.5
_WEIGHT_UPDATE_TIMEOUT_S = 1800.0  # a 30B model from a slow file system


# What SGLang says when the keys and values of a request found no room; it answers by an abort or by HTTP 500.
_NO_MEMORY = re.compile(r"out of memory|memory pressure|KV (cache )?pool", re.IGNORECASE)


class RequestError(Exception):
    """One attempt failed (connection, deadline, 5xx, an answer that makes no sense). It may be made again."""


class ServerBusy(RequestError):
    """The server declined for now (full queue), which is not its fault."""


class OutOfMemory(RequestError):
    """The KV cache had no room for this request, which is not the server's fault (sglang#19881)."""


class RequestRejected(Exception):
    """The server will never take this request (4xx, or its limits are too small): our fault or its flags'."""


class WeightUpdateFailed(Exception):
    """A server does not hold the weights it was told to load. It must get no work."""


class Finish(Enum):
    eos = "eos"
    length = "length"
    aborted = "aborted"


@dataclass(frozen=True)
class Sampling:
    """temperature: 0 is greedy. top_p: 1.0 is off. top_k: -1 is off."""

    temperature: float
    top_p: float = 1.0
    top_k: int = -1


@dataclass(frozen=True)
class Generation:
    """What one request brought; the three lists have the same length.

    log_probs: nats, at the sampling temperature, not renormalised for top-p or top-k. versions: weight
    version that made each token, as the server stamped it. abort_reason: the server's words, if it aborted
    (the tokens so far are good). cached_tokens: input tokens whose keys and values were still in the server's
    cache. out_of_memory: it aborted because the KV cache had no room.
    """

    tokens: List[int]
    log_probs: List[float]
    versions: List[int]
    finish: Finish
    abort_reason: Optional[str] = None
    cached_tokens: int = 0

    @property
    def out_of_memory(self) -> bool:
        return self.abort_reason is not None and _NO_MEMORY.search(self.abort_reason) is not None


class Endpoint:
    """Controls one server. Use it inside one event loop, and close it there."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self._session: Optional[aiohttp.ClientSession] = None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def healthy(self, *, timeout_s: float = _CONTROL_TIMEOUT_S) -> bool:
        """True if the server makes tokens; False while it starts, is paused (after 20 s), hangs, or is down."""
        try:
            async with self._open_session().get(
                f"{self.url}/health", timeout=aiohttp.ClientTimeout(total=timeout_s)
            ) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def reachable(self, *, timeout_s: float = _CONTROL_TIMEOUT_S) -> bool:
        """True once the server answers at all, paused or not."""
        try:
            await self.weight_version(timeout_s=timeout_s)
        except RequestError:
            return False
        return True

    async def weight_version(self, *, timeout_s: float = _CONTROL_TIMEOUT_S) -> str:
        """The version the server says it holds. Raises RequestError."""
        info = await self.get("/model_info", timeout_s=timeout_s)
        if "weight_version" not in info:
            raise RequestError(f"{self.url}/model_info: no weight_version in {info}")
        return str(info["weight_version"])

    async def update_weights_from_disk(self, path: str, version: int) -> None:
        """Pause, load the HF directory `path`, drop the KV cache, confirm, go on.

        Requests in flight are retracted and continue under the new weights; their keys and values are
        computed anew (RLinf#96, AReaL#421). Raises WeightUpdateFailed naming the server; what was in flight
        there is then aborted, since nobody knows which weights it would continue under.
        """
        try:
            await self.control("/pause_generation", {"mode": "retract"}, _CONTROL_TIMEOUT_S)
            update = {"model_path": path, "weight_version": str(version), "flush_cache": True}
            await self.control("/update_weights_from_disk", update, _WEIGHT_UPDATE_TIMEOUT_S)
            held = await self.weight_version()
            if held != str(version):
                raise RequestError(f"the server holds version {held!r}")
            await self.control("/continue_generation", {}, _CONTROL_TIMEOUT_S)
        except (RequestError, RequestRejected, TimeoutError) as error:
            await self._abandon()
            raise WeightUpdateFailed(f"{self.url}: weights {path} (version {version}): {error!r}") from error

    async def open_weight_update(self) -> None:
        """Pause for weights by broadcast; requests in flight continue under them. Raises WeightUpdateFailed."""
        try:
            await self.control("/pause_generation", {"mode": "retract"}, _CONTROL_TIMEOUT_S)
            await self.control("/begin_weight_update", {"selector": "all"}, _CONTROL_TIMEOUT_S)
        except (RequestError, RequestRejected, TimeoutError) as error:
            raise WeightUpdateFailed(f"{self.url}: {error!r}") from error

    async def close_weight_update(self, version: Optional[int]) -> None:
        """Confirm `version` and go on; None: stay paused for another broadcast. Raises WeightUpdateFailed."""
        try:
            await self.control("/end_weight_update", {}, _CONTROL_TIMEOUT_S)
            if version is None:
                return
            held = await self.weight_version()
            if held != str(version):
                raise RequestError(f"the server holds version {held!r}")
            await self.control("/continue_generation", {}, _CONTROL_TIMEOUT_S)
        except (RequestError, RequestRejected, TimeoutError) as error:
            raise WeightUpdateFailed(f"{self.url}: weights of version {version}: {error!r}") from error

    async def _abandon(self) -> None:
        """Best effort: ends what is in flight and the pause, so that the server can be had again."""
        with suppress(RequestError, RequestRejected, TimeoutError):
            await self.control("/abort_request", {"abort_all": True}, _CONTROL_TIMEOUT_S)
            await self.control("/continue_generation", {}, _CONTROL_TIMEOUT_S)

    async def control(self, route: str, payload: dict, timeout_s: float) -> Any:
        """What the server answers. Raises RequestError (also for "success": false), RequestRejected, TimeoutError."""
        answer = await self._post(route, payload, timeout_s)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise RequestError(f"{self.url}{route}: {answer.get('message')}")
        return answer

    async def get(self, route: str, *, timeout_s: float) -> Dict[str, Any]:
        """The JSON object at `route`. Raises RequestError."""
        try:
            async with self._open_session().get(
                self.url + route, timeout=aiohttp.ClientTimeout(total=timeout_s)
            ) as response:
                answer = await response.json()
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise RequestError(f"{self.url}{route}: {error!r}") from error
        if not isinstance(answer, dict):
            raise RequestError(f"{self.url}{route}: {answer!r} is not an object")
        return answer

    async def _post(self, route: str, payload: dict, timeout_s: float) -> Any:
        """The decoded JSON answer. Raises RequestError, RequestRejected, TimeoutError (after timeout_s)."""
        try:
            async with asyncio.timeout(timeout_s):
                async with self._open_session().post(self.url + route, json=payload) as response:
                    if response.status == 200:
                        return await response.json(content_type=None)
                    text = (await response.text())[:500]
        except (aiohttp.ClientError, ValueError) as error:
            raise RequestError(f"{self.url}{route}: {error!r}") from error
        raise _failure(response.status, text)(f"{self.url}{route}: HTTP {response.status}: {text}")

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            # No limit: the server queues. No keep-alive: it closes idle connections under our next request.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self._session


class Client(Endpoint):
    """Makes requests of one server that serves `model`."""

    def __init__(self, url: str, model: ServedModel):
        super().__init__(url)
        self.model = model

    async def generate(
        self,
        input_ids: List[int],
        sampling: Sampling,
        max_new_tokens: int,
        *,
        timeout_s: float,
        cut: Optional[asyncio.Event] = None,
    ) -> Generation:
        """Asks once for up to max_new_tokens more tokens. Once `cut` is set it is aborted: what there is comes back.

        After timeout_s the request is aborted on the server and RequestError raised (verl#7155). Raises
        RequestError, RequestRejected, and ValueError for ids outside the vocabulary (they would kill the
        server).
        """
        outside = next((i for i in input_ids if not 0 <= i < self.model.vocab_size), None)
        if outside is not None or not input_ids:
            raise ValueError(f"input_ids: id {outside} of {len(input_ids)} is not in [0, {self.model.vocab_size})")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens: {max_new_tokens} is below 1")
        rid = uuid.uuid4().hex
        payload = {
            "rid": rid,
            "input_ids": input_ids,
            # Made anew for each request: servers and peers alter shared ones (verl#6364).
            "sampling_params": {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k,
                "max_new_tokens": max_new_tokens,
                "stop_token_ids": sorted(self.model.stop_token_ids),
            },
            "return_logprob": True,
            "stream": False,
        }
        cutting = None if cut is None else asyncio.create_task(self._abort_after(cut, rid))
        try:
            answer = await self._post("/generate", payload, timeout_s)
        except TimeoutError as error:
            await self.abort(rid)
            raise RequestError(f"{self.url}: request {rid} was not answered within {timeout_s:g} s") from error
        finally:
            if cutting is not None:
                cutting.cancel()
        try:
            generation = parse_generation(answer, max_new_tokens)
        except (LookupError, TypeError, ValueError) as error:
            raise RequestError(f"{self.url}: answer to {rid} makes no sense: {error!r}") from error
        if generation.finish is Finish.length and len(generation.tokens) < max_new_tokens:
            raise RequestRejected(
                f"{self.url} stopped at {len(generation.tokens)} of {max_new_tokens} tokens after "
                f"{len(input_ids)} input ids: its --context-length or its KV cache (--max-total-tokens) is "
                "too small for this run"
            )
        return generation

    async def _abort_after(self, cut: asyncio.Event, rid: str) -> None:
        await cut.wait()
        while True:  # again, since the server may not know the request yet
            await self.abort(rid)
            await asyncio.sleep(_ABORT_AGAIN_S)

    async def abort(self, rid: str) -> None:
        """Asks the server to drop a request. Best effort: it answers 200 whether it knew it or not."""
        with suppress(RequestError, RequestRejected, TimeoutError):
            await self._post("/abort_request", {"rid": rid}, timeout_s=10.0)


def _failure(status: int, text: str) -> Type[Exception]:
    """What an HTTP status says. Only 400, 413 and 422 are about the request; other 4xx are no SGLang server's."""
    if status in (400, 413, 422):
        return RequestRejected
    if status >= 500 and _NO_MEMORY.search(text):
        return OutOfMemory
    return ServerBusy if status in (408, 429, 503) else RequestError


def parse_generation(answer: Any, max_new_tokens: int) -> Generation:
    """Checks an answer of /generate and types it. Raises LookupError, TypeError or ValueError if it is not
    sound.

    Every token must have a log-prob (strands-sglang#34) for its own id, and a weight version.
    """
    meta = answer["meta_info"]
    tokens = answer["output_ids"]
    if not all(type(t) is int for t in tokens):
        raise TypeError("output_ids holds something that is not an id")
    if len(tokens) > max_new_tokens:
        raise ValueError(f"{len(tokens)} tokens, {max_new_tokens} were asked for")
    pairs = [(entry[0], entry[1]) for entry in meta["output_token_logprobs"]]
    if [token for _, token in pairs] != tokens:
        raise ValueError("output_token_logprobs and output_ids are of different tokens")
    log_probs = [log_prob for log_prob, _ in pairs]
    for log_prob in log_probs:
        if not isinstance(log_prob, (int, float)) or not -math.inf < log_prob <= 0:
            raise ValueError(f"{log_prob!r} is not a log-prob")
    finish, reason = _finish(meta["finish_reason"], tokens)
    return Generation(
        tokens,
        log_probs,
        _versions(meta, len(tokens)),
        finish,
        reason,
        cached_tokens=int(meta["cached_tokens"]),
    )


def _finish(finish_reason: dict, tokens: List[int]) -> tuple:
    kind = finish_reason["type"]
    if kind == "length":
        return Finish.length, None
    if kind == "stop":
        # A string instead of an id is how the server says that it met NaN.
        if not tokens or finish_reason["matched"] != tokens[-1]:
            raise ValueError(f"stopped at {finish_reason['matched']!r}, which is not the last token")
        return Finish.eos, None
    if kind == "abort":
        return Finish.aborted, str(finish_reason["message"])
    raise ValueError(f"finish_reason {kind!r}")


def _versions(meta: dict, count: int) -> List[int]:
    """One version a token, from the spans the server stamped."""
    if count == 0:
        return []
    versions: List[int] = []
    for span in meta["weight_versions"]:
        if span["start"] != len(versions):
            raise ValueError(f"weight_versions {meta['weight_versions']} leave a gap")
        versions += [int(span["version"])] * (span["end"] - span["start"])
    if len(versions) != count:
        raise ValueError(f"weight_versions cover {len(versions)} of {count} tokens")
    return versions
