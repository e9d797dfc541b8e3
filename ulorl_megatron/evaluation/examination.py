"""Every checkpoint on every data set: attempts made, resumed and turned into results."""

import asyncio
import json
import shutil
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

from omegaconf import OmegaConf
from transformers import AutoTokenizer

from checkpoint_tools.publish import lock_or_close, write_json
from ulorl_megatron.attempts import Attempt, Journal, Problem, Sampler
from ulorl_megatron.config.schema import Config, VerifierKind
from ulorl_megatron.errors import UserError
from ulorl_megatron.evaluation.checkpoints import Checkpoint, hf_folder
from ulorl_megatron.evaluation.results import Results, results
from ulorl_megatron.evaluation.sets import read_sets
from ulorl_megatron.monitor.run_directory import CHANGEABLE
from ulorl_megatron.rollout.client import Sampling
from ulorl_megatron.rollout.tasks import task_group

_SECONDS_BETWEEN_LINES = 10.0
_RESPONSES = "responses"
_WEIGHTS = "weights"

# (checkpoint's label, set) -> results
Table = Dict[Tuple[str, str], Results]


def examine(config: Config, checkpoints: List[Checkpoint], out: Path, *, force: bool = False) -> Table:
    """Results of all, from the attempts in `out`; the missing ones are made, on the servers of `config`.

    out/responses/LABEL/SET.jsonl holds the attempts, out/weights/ what was made of Megatron checkpoints. force:
    attempts by other settings are thrown away; otherwise they are a UserError. Raises as Sampler and read_sets do.
    """
    sets = read_sets(config, AutoTokenizer.from_pretrained(config.model.path))
    with _locked(out), ExitStack() as opened:
        for checkpoint in checkpoints:
            _bind(out, checkpoint.label, _settings(config, checkpoint), force)
        journals = {
            (c.label, name): opened.enter_context(Journal(out / _RESPONSES / c.label / f"{name}.jsonl"))
            for c in checkpoints
            for name in sets
        }
        unfinished = [c for c in checkpoints if any(_missing(config, journals[c.label, n], sets[n]) for n in sets)]
        folders = [hf_folder(checkpoint, out / _WEIGHTS) for checkpoint in unfinished]
        if unfinished:
            sampler = opened.enter_context(Sampler(config, out))
            for checkpoint, folder in zip(unfinished, folders, strict=True):
                if checkpoint is not unfinished[0] or folder.resolve() != Path(config.model.path).resolve():
                    sampler.load(folder)
                for name, problems in sets.items():
                    journal = journals[checkpoint.label, name]
                    progress = _Progress(f"{checkpoint.label} {name}", _missing(config, journal, problems))
                    sampler.loop.run(_attempt_all(config, sampler, problems, journal, progress))
        k = config.evaluation.samples_per_prompt
        return {
            (label, name): _results(label, name, [journal.of(problem.key)[:k] for problem in sets[name]])
            for (label, name), journal in journals.items()
        }


async def _attempt_all(
    config: Config, sampler: Sampler, problems: List[Problem], journal: Journal, progress: "_Progress"
) -> None:
    """As many responses in flight as training has; more would only queue, each with a connection of its own."""
    k = config.evaluation.samples_per_prompt
    sampling = Sampling(config.evaluation.temperature, config.evaluation.top_p, config.evaluation.top_k)
    places = asyncio.Semaphore(max(1, config.rollout.prompts_per_step * config.rollout.group_size // k))

    async def attempt(problem: Problem) -> None:
        async with places:
            await sampler.attempts(problem, k, sampling, journal, progress.count)

    async with task_group() as tasks:
        for problem in problems:
            tasks.create_task(attempt(problem))


def _missing(config: Config, journal: Journal, problems: List[Problem]) -> int:
    k = config.evaluation.samples_per_prompt
    return sum(max(0, k - len(journal.of(problem.key))) for problem in problems)


def _results(label: str, name: str, groups: List[List[Attempt]]) -> Results:
    try:
        return results(groups)
    except ValueError as error:
        raise UserError(f"{label} on {name}: {error}; is the verifier the right one for these answers?") from error


def _settings(config: Config, checkpoint: Checkpoint) -> Dict[str, Any]:
    """What the attempts of a checkpoint depend on, besides the problems, which have keys of their own."""
    settings: Dict[str, Any] = {}
    for section in ("model", "verifier"):
        whole = OmegaConf.to_container(OmegaConf.structured(config)[section], enum_to_str=True)
        settings |= {f"{section}.{key}": value for key, value in whole.items() if not isinstance(value, dict)}
    if config.verifier.kind is not VerifierKind.rule:
        judge = OmegaConf.to_container(OmegaConf.structured(config).verifier.judge)
        settings |= {f"verifier.judge.{key}": value for key, value in judge.items()}
    # The model's path is in the checkpoint's place; how fast and where it is judged makes no difference.
    kept = {k: v for k, v in settings.items() if k != "model.path" and not k.startswith(CHANGEABLE)}
    sampling = {f"evaluation.{key}": getattr(config.evaluation, key) for key in ("temperature", "top_p", "top_k")}
    length = {"rollout.global_max_length": config.rollout.global_max_length}
    return {"checkpoint": checkpoint.stamp()} | sampling | length | kept


def _bind(out: Path, label: str, settings: Dict[str, Any], force: bool) -> None:
    """The folder of a checkpoint belongs to one checkpoint and one way of sampling and judging."""
    folder = out / _RESPONSES / label
    file = folder / "settings.json"
    if file.is_file() and (before := json.loads(file.read_text())) != settings:
        differ = sorted(key for key in before.keys() | settings.keys() if before.get(key) != settings.get(key))
        if not force:
            raise UserError(
                f"{folder} holds responses made with another {', '.join(differ)}; give --force to throw them away, or "
                "another --out"
            )
        shutil.rmtree(folder)
        shutil.rmtree(out / _WEIGHTS / label, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(file, settings)


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    out.mkdir(parents=True, exist_ok=True)
    with (out / "lock").open("w") as lock:
        busy = f"{out}: another evaluation is writing there; wait for it, or give another --out"
        lock_or_close(lock, UserError(busy))
        yield


class _Progress:
    """A line now and then, on stderr."""

    def __init__(self, title: str, total: int):
        self._title = title
        self._total = total
        self._done = self._right = 0
        self._began = self._told = time.monotonic()

    def count(self, attempt: Attempt) -> None:
        self._done += 1
        self._right += attempt.reward == 1
        now = time.monotonic()
        if now - self._told >= _SECONDS_BETWEEN_LINES or self._done == self._total:
            self._told = now
            print(
                f"{self._title}: {self._done} of {self._total} responses, {self._done / (now - self._began):.2f} a "
                f"second, {self._right / self._done:.3f} right so far",
                file=sys.stderr,
                flush=True,
            )
