"""A server that is a formula, with the interface of rollout.client.Client."""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from random import Random
from typing import Deque, List, Optional

from ulorl_megatron.rollout.client import Finish, Generation, Sampling
from ulorl_megatron.simulate.lengths import Lengths, draw_length

_EOS, _WORD = 1, 0
_REFRESH = 0.05  # the speed is taken anew at the latest when the contexts have grown by this share


@dataclass(frozen=True)
class ServerModel:
    """What a server can do; times in seconds, tokens in real ones.

    One decoding step gives every running request a token and takes step_s + sequence_s * requests + context_s * (sum of
    their contexts). prefill_tokens_per_s: input tokens that are not cached, during which nothing is decoded.
    kv_tokens: contexts that fit; beyond them the latest request waits, and is computed anew later.
    update_s: of loading weights, during which it is paused; what it was decoding is computed anew afterwards.
    """

    step_s: float
    sequence_s: float
    context_s: float
    prefill_tokens_per_s: float
    kv_tokens: int
    max_running: int = 1024
    update_s: float = 0.0


@dataclass(eq=False)
class _Request:
    input_tokens: int
    wanted: int  # tokens until EOS or the budget
    ends: bool  # by EOS
    answer: asyncio.Future
    done: float = 0.0
    versions: List[int] = field(default_factory=list)

    @property
    def context(self) -> float:
        return self.input_tokens + self.done


@dataclass
class Load:
    """Of one server so far. decoded, prefilled: tokens. busy_s: with requests. retractions: for want of room."""

    decoded: float = 0.0
    prefilled: int = 0
    busy_s: float = 0.0
    retractions: int = 0


class SimulatedServer:
    """Continuous batching in the loop's time. grain: real tokens that one simulated token stands for."""

    def __init__(self, url: str, model: ServerModel, lengths: Lengths, prompt_tokens: int, grain: int, random: Random):
        self.url = url
        self.load = Load()
        self._model, self._lengths, self._grain, self._random = model, lengths, grain, random
        self._prompt = prompt_tokens
        self._version = 0
        self._waiting: Deque[_Request] = deque()
        self._running: List[_Request] = []
        self._prefill_s = 0.0  # still to be spent before decoding goes on
        self._step_s = 0.0
        self._since = 0.0
        self._timer: Optional[asyncio.TimerHandle] = None
        self._paused = False

    async def close(self) -> None:
        self._cancel_timer()

    async def healthy(self, *, timeout_s: float = 0.0) -> bool:
        await asyncio.sleep(timeout_s)  # asked all the time, and it always is
        return True

    async def reachable(self, *, timeout_s: float = 0.0) -> bool:
        return True

    async def update_weights_from_disk(self, path: str, version: int) -> None:
        self._advance()
        for request in self._running:
            self._stamp(request, int(request.done))
        self.load.retractions += len(self._running)
        self._waiting.extendleft(reversed(self._running))
        self._running.clear()
        self._prefill_s, self._paused = 0.0, True
        self._cancel_timer()
        await asyncio.sleep(self._model.update_s)
        self._version, self._paused = version, False
        self._advance()
        self._go_on()

    async def generate(
        self,
        input_ids: List[int],
        sampling: Sampling,
        max_new_tokens: int,
        *,
        timeout_s: float,
        cut: Optional[asyncio.Event] = None,
    ) -> Generation:
        so_far = (len(input_ids) - self._prompt) * self._grain
        whole = draw_length(self._lengths, so_far, self._random)
        rest = max(1, round((whole - so_far) / self._grain))
        answer = asyncio.get_running_loop().create_future()
        request = _Request(len(input_ids), min(rest, max_new_tokens), rest <= max_new_tokens, answer)
        self._advance()
        self._waiting.append(request)
        self._go_on()
        waiting = [answer] if cut is None else [answer, asyncio.ensure_future(cut.wait())]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting[-1].cancel()
            if request in self._running or request in self._waiting:  # the caller gave up
                self._advance()
                (self._running if request in self._running else self._waiting).remove(request)
                self._go_on()
        if request.done < request.wanted - 1e-6:
            n = int(request.done)
            self._stamp(request, n)
            return Generation([_WORD] * n, [0.0] * n, request.versions, Finish.aborted, "cut short")
        n = request.wanted
        tokens = [_WORD] * (n - 1) + [_EOS if request.ends else _WORD]
        return Generation(tokens, [0.0] * n, request.versions, Finish.eos if request.ends else Finish.length)

    def _stamp(self, request: _Request, n: int) -> None:
        """The present weights made the latest of its first n tokens."""
        request.versions += [self._version] * (n - len(request.versions))

    def _advance(self) -> None:
        """Brings every running request to the present."""
        now = asyncio.get_running_loop().time()
        passed, self._since = now - self._since, now
        if not self._running:
            return
        self.load.busy_s += passed
        prefill = min(passed, self._prefill_s)
        self._prefill_s -= prefill
        grown = (passed - prefill) / self._step_s if self._step_s else 0.0
        for request in self._running:
            request.done += grown
        self.load.decoded += grown * len(self._running) * self._grain
        finished = [r for r in self._running if r.done >= r.wanted - 1e-6]
        self._running = [r for r in self._running if r.done < r.wanted - 1e-6]
        for request in finished:
            self._stamp(request, request.wanted)
            if not request.answer.done():
                request.answer.set_result(None)

    def _go_on(self) -> None:
        """Lets in what fits, puts out what does not, and sleeps until something changes."""
        self._cancel_timer()
        if self._paused:
            return
        room = self._model.kv_tokens / self._grain
        held = sum(r.context for r in self._running)
        while len(self._running) > 1 and held > room:
            out = self._running.pop()
            held -= out.context
            self.load.retractions += 1
            self._waiting.appendleft(out)
        while self._waiting and len(self._running) < self._model.max_running:
            request = self._waiting[0]
            if self._running and held + request.context > room:
                break
            self._waiting.popleft()
            self._running.append(request)
            held += request.context
            self.load.prefilled += round(request.context * self._grain)
            self._prefill_s += request.context * self._grain / self._model.prefill_tokens_per_s
        if not self._running:
            return
        model = self._model
        one = model.step_s + model.sequence_s * len(self._running) + model.context_s * held * self._grain
        self._step_s = one * self._grain
        steps = min(r.wanted - r.done for r in self._running)
        steps = min(steps, max(1.0, _REFRESH * held / len(self._running)))
        self._timer = asyncio.get_running_loop().call_later(self._prefill_s + steps * self._step_s, self._wake)

    def _wake(self) -> None:
        self._timer = None
        self._advance()
        self._go_on()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
