"""Rank 0's half of the loop: prompts, pools, servers and the verifier."""

import asyncio
from collections import Counter
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Dict, List, Optional, Tuple

import numpy as np
import torch
from transformers import AutoTokenizer

from ulorl_megatron.algorithm.batch import TrainSample
from ulorl_megatron.config.schema import Config
from ulorl_megatron.config.sets import evaluation_sets
from ulorl_megatron.data import PromptSet
from ulorl_megatron.evaluation.periodic import evaluate
from ulorl_megatron.launch import stop_asked
from ulorl_megatron.monitor.exhibits import Exhibits, sample_text
from ulorl_megatron.monitor.run_directory import identity
from ulorl_megatron.rollout.journal import Journal
from ulorl_megatron.rollout.loop_thread import LoopThread
from ulorl_megatron.rollout.pools import Pools
from ulorl_megatron.rollout.sample import Sample, Status, age
from ulorl_megatron.rollout.scheduler import RolloutStats, SegmentRollout
from ulorl_megatron.rollout.served_model import ServedModel
from ulorl_megatron.rollout.server_pool import ServerPool
from ulorl_megatron.rollout.store import PoolStore
from ulorl_megatron.verifier import Verdict, build_verifier
from ulorl_megatron.verifier.tally import Tally
from ulorl_megatron.verifier.texts import judged_texts
from ulorl_megatron.weight_sync.checksums import verify_weights

_SHOWN_SAMPLES, _SHOWN_TOKENS = 2, 1024  # right and wrong ones of each step; of the end of prompt and response


class Generation:
    """Everything that makes experience. One object, on rank 0, with one event loop; use it as a context manager.

    Making it only reads: raises UserError for bad data, naming file and line. `start` opens what has to be closed.
    """

    def __init__(self, config: Config):
        self._config = config
        self._tokenizer = AutoTokenizer.from_pretrained(config.model.path)
        self._model = ServedModel.from_path(Path(config.model.path))
        self._prompts = self._read(config.data.train)
        self._heldout = {name: self._read(file) for name, file in evaluation_sets(config.data).items()}
        self._metrics: Dict[str, float] = {}
        self._exhibits = Exhibits([], {}, [])
        self._collecting: Optional[asyncio.Task] = None
        self._opened = ExitStack()

    def _read(self, file: str) -> PromptSet:
        return PromptSet(file, self._tokenizer, self._config.data.max_prompt_length, self._config.run.seed)

    def __enter__(self) -> "Generation":
        return self

    def __exit__(self, *exception) -> None:
        self._opened.close()

    def start(self) -> None:
        """Opens the pools and starts the servers, which get ready while the policy is built.

        Raises UserError when another process has the run directory, or a port is in use.
        """
        config = self._config
        self._store = PoolStore(Path(config.run.dir) / "pools.sqlite")
        self._opened.callback(self._store.close)
        self._servers = ServerPool(config, self._model)
        self._rollout = SegmentRollout(self._servers, config.rollout)
        self._loop = self._opened.enter_context(LoopThread())
        self._opened.callback(lambda: self._loop.run(self._servers.close()))
        self._servers.start()
        self._verifier = build_verifier(config.verifier)
        self._opened.callback(lambda: self._loop.run(self._verifier.close()))
        self._opened.callback(self._stop_collecting)

    def resume(self, step: int) -> None:
        """Takes the pools back to the end of `step` (0: a fresh start) and waits for the servers."""
        self._store.rewind(step)
        if step == 0:  # later, the checkpoint binds configuration and weights
            self._store.begin_as(_origin(self._config))
        self._pools = Pools(self._store, self._config.rollout, self._config.experience)
        self._loop.run(self._servers.wait_ready())
        self._loop.run(self._verifier.ready())

    def load_weights(self, path: Path, version: int) -> None:
        """Every server loads the HF folder `path`; what they decode from now on is stamped `version`."""
        self._loop.run(self._servers.update_weights(path, version))

    def open_weight_update(self) -> List[str]:
        """Pauses the servers for weights by broadcast; the URLs of those that take part."""
        return self._loop.run(self._servers.open_update())

    def close_weight_update(self, version: int, failures: Dict[str, str]) -> None:
        """The servers confirm `version`. failures: URL -> what went wrong; if there are any, it is to be done again."""
        self._loop.run(self._servers.close_update(version, failures))

    def verify_weights(self, folder: Path) -> None:
        """Compares the checksums of what every server holds with those of the HF folder that it should hold.

        Raises UserError naming the first tensors that differ: training goes on with no server that is not what it says.
        """
        self._loop.run(verify_weights([member.client for member in self._servers.serving()], folder))

    def collect(self, step: int) -> bool:
        """One segment of every unfinished sample, and of as many new prompts as there is room for.

        False: a stop was asked for first (launch.stop). The step is given up; what arrived waits for it to begin again.
        """
        if self._collecting is None:
            self.collect_ahead(step)
        try:
            complete, collected = self._loop.result(self._collecting, unless=stop_asked)
        finally:
            self._stop_collecting()
        if complete:
            self._metrics, self._exhibits = collected
        return complete

    def collect_ahead(self, step: int) -> None:
        """Begins `collect`, which later waits for the rest; weights may be loaded meanwhile (rollout.overlap)."""
        self._pools.admit(step, self._prompts)
        in_flight = self._pools.unfinished
        self._pools.recall(step)
        self._collecting = self._loop.start(self._collect(step, in_flight))

    async def _collect(self, step: int, samples: List[Sample]) -> Tuple[Dict[str, float], Exhibits]:
        journal, tally, judged = Journal(self._store), Tally(), {}

        async def judge(sample: Sample) -> Verdict:
            verdict = await self._judge(sample.prompt_tokens, sample.tokens, sample.answer)
            judged[sample.id] = verdict.by.value
            return verdict

        async with journal.open(step) as keep:
            stats = await self._rollout.collect(step, samples, lambda sample: tally.reward(judge(sample)), keep)
        metrics = _rollout_metrics(stats, samples) | tally.metrics() | {"time/journal": journal.written_s}
        return metrics, self._show(step, samples, judged)

    def _show(self, step: int, samples: List[Sample], judged: Dict[int, str]) -> Exhibits:
        """judged: sample id -> by whom; the others were truncated, or judged before a kill."""
        complete = [sample for sample in samples if sample.status is Status.waiting]
        right = [sample for sample in complete if sample.reward == 1]
        wrong = [sample for sample in complete if sample.reward != 1]
        texts = [
            sample_text(
                prompt=self._tokenizer.decode(sample.prompt_tokens[-_SHOWN_TOKENS:]),
                response=self._tokenizer.decode(sample.tokens[-_SHOWN_TOKENS:]),
                answer=sample.answer,
                reward=sample.reward,
                verdict="truncated" if sample.truncated else judged.get(sample.id, "judged earlier"),
                versions=len(set(sample.versions)),
            )
            for sample in right[:_SHOWN_SAMPLES] + wrong[:_SHOWN_SAMPLES]
        ]
        ages: Counter[int] = Counter()
        for version, tokens in Counter(chain.from_iterable(s.versions for s in complete)).items():
            ages[age(version, step - 1)] += tokens  # versions are few, tokens may be millions
        return Exhibits([sample.length for sample in complete], dict(ages), texts)

    def _stop_collecting(self) -> None:
        """Before anything closes: the servers must not be brought back, and what arrived must be written."""
        if self._collecting is not None:
            self._loop.stop(self._collecting)
            self._collecting = None

    def release(self, step: int) -> List[TrainSample]:
        """The experience that trains in this step."""
        released = self._pools.release(step)
        self._metrics |= _release_metrics([sample for sample, _ in released])
        return [_train_sample(sample, advantage, version=step - 1) for sample, advantage in released]

    def commit(self, step: int) -> Dict[str, float]:
        """Makes the step durable; the conservation law is checked here. Returns the step's metrics of experience."""
        counts = self._pools.commit(step)
        self._metrics |= {f"pools/{status.value}": count for status, count in counts.items()}
        self._metrics |= self._servers.metrics()
        reward = self._store.mean_reward()
        return self._metrics if reward is None else self._metrics | {"reward/issued": reward}

    def exhibits(self) -> Exhibits:
        """What of the last step is shown besides numbers."""
        return self._exhibits

    def forget(self, step: int) -> None:
        """Drops the tokens of samples settled by `step`: no checkpoint is left that would need them again."""
        self._store.forget(step)

    def evaluate(self) -> Dict[str, float]:
        """avg@k of the weights the servers hold, on data.eval, as metrics."""
        return self._loop.run(evaluate(self._rollout, self._heldout, self._config.evaluation, self._judge))

    async def _judge(self, prompt: List[int], response: List[int], answer: str) -> Verdict:
        question, text = judged_texts(self._tokenizer, prompt, response)
        return await self._verifier.verify(question=question, response=text, answer=answer)


def _origin(config: Config) -> str:
    """What the segments of step 1 depend on: the configuration, and the files of the model."""
    files = sorted([*Path(config.model.path).glob("*.safetensors"), *Path(config.model.path).glob("*.json")])
    stamps = [f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}" for file in files]
    return "\n".join([identity(config), *stamps])


def _train_sample(sample: Sample, advantage: float, version: int) -> TrainSample:
    """version: weights of this step's rollout."""
    return TrainSample(
        sample_id=sample.id,
        tokens=torch.tensor(sample.prompt_tokens + sample.tokens),
        prompt_length=len(sample.prompt_tokens),
        reward=sample.reward,
        advantage=advantage,
        behaviour_log_probs=torch.tensor(sample.log_probs),
        ages=torch.tensor([age(v, version) for v in sample.versions]),
    )


def _rollout_metrics(stats: RolloutStats, samples: List[Sample]) -> Dict[str, float]:
    metrics = {
        "rollout/samples": stats.samples,
        "rollout/finished": stats.finished,
        "rollout/truncated": stats.truncated,
        "rollout/unfinished": stats.unfinished,
        "rollout/tokens": stats.tokens,
        "rollout/tokens_per_s": stats.tokens / (stats.decode_s + stats.verify_s),
        "rollout/cached_share": stats.cached_tokens / max(stats.input_tokens, 1),
        "rollout/reprefilled": stats.reprefilled_tokens,
        "rollout/recalled": stats.recalled,
        "rollout/aborts": stats.aborts,
        "rollout/failed_requests": stats.failed_requests,
        "rollout/verifier_failures": stats.verifier_failures,
        "time/verify": stats.verify_s,
    }
    complete = [sample for sample in samples if sample.status is Status.waiting]
    if complete:
        metrics |= {
            "reward/complete": float(np.mean([sample.reward for sample in complete])),
            "rollout/truncated_share": stats.truncated / len(complete),
            "rollout/length_mean": float(np.mean([sample.length for sample in complete])),
            "rollout/length_max": max(sample.length for sample in complete),
        }
    return metrics


def _release_metrics(samples: List[Sample]) -> Dict[str, float]:
    metrics = {
        "train/samples": len(samples),
        "train/multi_version_samples": sum(len(set(sample.versions)) > 1 for sample in samples),
        "train/truncated_samples": sum(sample.truncated for sample in samples),
    }
    if samples:
        metrics["reward/mean"] = float(np.mean([sample.reward for sample in samples]))
        metrics["reward/penalty"] = float(np.mean([sample.penalty for sample in samples]))
    return metrics
