"""The step that removes what the policy can do already."""

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterable, Iterator, List, Optional, Tuple

from omegaconf import MISSING

from ulorl_megatron.attempts import Journal, Problem, Sampler
from ulorl_megatron.config import Config, load
from ulorl_megatron.data.files import sha256
from ulorl_megatron.data.prompts import encode_prompt
from ulorl_megatron.data.step import Dropped, Outcome, Row, Step, Workspace, in_flight
from ulorl_megatron.errors import UserError
from ulorl_megatron.rollout.client import Sampling

_AHEAD = 128  # problems in work at a time


@dataclass
class Difficulty(Step):
    """Drops problems that the policy solves in more than `at_most` of `attempts` attempts, and fewer than `at_least`.

    policy: a training configuration, whose model.path, servers, verifier, rollout lengths and sampling count.
    overrides: settings on top of it, as section.key=value. The paper drops what is right in all of 8, so null is
    attempts - 1. A row that stays gets `solved`, "5/8". One whose attempts a judge could not tell is dropped.
    """

    policy: str = MISSING
    overrides: List[str] = field(default_factory=list)
    attempts: int = 8
    at_most: Optional[int] = None
    at_least: int = 0

    def check(self) -> None:
        if self.attempts < 1:
            raise UserError(f"difficulty.attempts: {self.attempts} is below 1")
        self._config()

    def files(self) -> Iterable[Path]:
        model = Path(self._config().model.path)
        return [Path(self.policy), *sorted(model.glob("*.json")), *sorted(model.glob("*.safetensors"))]

    def run(self, rows: Iterable[Row], work: Workspace) -> Iterator[Tuple[Row, Outcome]]:
        config = self._config()
        limit = config.data.max_prompt_length
        sampling = Sampling(config.rollout.temperature, config.rollout.top_p, config.rollout.top_k)
        with Journal(work.journal(self._bound(config))) as journal, Sampler(config, work.folder / work.name) as sampler:

            async def outcome(row: Row) -> Outcome:
                tokens = encode_prompt(sampler.tokenizer, row["prompt"])
                if len(tokens) > limit:
                    return Dropped("prompt too long for the policy", f"{len(tokens)} tokens")
                problem = Problem(tokens, row["answer"])
                tried = await sampler.attempts(problem, self.attempts, sampling, journal)
                unclear = [attempt.by for attempt in tried if attempt.reward is None]
                if unclear:
                    return Dropped("the judge cannot tell", f"{len(unclear)} of {self.attempts}: {unclear[0]}")
                return self._rated(row, int(sum(attempt.reward for attempt in tried)))

            yield from in_flight(rows, outcome, sampler.loop, _AHEAD)

    def _rated(self, row: Row, right: int) -> Outcome:
        solved = f"{right}/{self.attempts}"
        if right > (self.attempts - 1 if self.at_most is None else self.at_most):
            return Dropped("too easy", solved)
        if right < self.at_least:
            return Dropped("too hard", solved)
        return row | {"solved": solved}

    def _bound(self, config: Config) -> str:
        """What attempts depend on, as a digest: those of another policy are not taken for this one's."""
        r = config.rollout
        sampling = [r.temperature, r.top_p, r.top_k, r.global_max_length]
        files = [sha256(file) for file in self.files() if str(file) != self.policy]
        return hashlib.sha256(repr([sampling, config.verifier, files]).encode()).hexdigest()[:12]

    def _config(self) -> Config:
        return load(self.policy, self.overrides)
