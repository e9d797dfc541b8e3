"""The layouts that are compared with one process, and what is computed in each."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, List

from tests.policy.support import hf_weights, make_samples, objective, policy_config, read_out_gradients
from tests.tiny_models import tiny_model
from ulorl_megatron.algorithm.batch import TrainSample
from ulorl_megatron.config.schema import ParallelConfig, Recompute
from ulorl_megatron.policy import Policy


@dataclass(frozen=True)
class Case:
    """A model of `MODELS` in one layout, with activations recomputed or not."""

    model: str
    sizes: Dict[str, int]
    recompute: Recompute = Recompute.none

    @property
    def name(self) -> str:
        parts = [self.model, *(f"{key}{size}" for key, size in self.sizes.items())]
        return "-".join(parts + ([] if self.recompute is Recompute.none else [self.recompute.value]))


MODELS = {
    "moe": dict(kind="moe"),
    "deep": dict(kind="moe", num_hidden_layers=4),  # two layers a stage, for the interleaved schedule
    "odd": dict(kind="moe", vocab_size=271),  # a vocabulary that two ranks must pad
    "wide": dict(kind="moe", num_key_value_heads=4),  # for four tensor-parallel ranks
    "dense": dict(kind="dense"),
    "tied": dict(kind="tied"),
    "deep_tied": dict(kind="tied", num_hidden_layers=4),
}

CASES = {
    2: [
        Case("moe", dict(expert=2)),
        Case("moe", dict()),
        Case("moe", dict(tensor=2)),
        Case("moe", dict(tensor=2, expert=2)),
        Case("moe", dict(tensor=2, expert_tensor=2)),
        Case("moe", dict(context=2)),
        Case("moe", dict(pipeline=2)),
        Case("deep", dict(pipeline=2, virtual_pipeline=2)),
        Case("odd", dict(tensor=2)),
        Case("dense", dict(tensor=2)),
        Case("dense", dict(context=2)),
        Case("tied", dict(tensor=2)),
        Case("tied", dict(pipeline=2)),
        Case("deep_tied", dict(pipeline=2, virtual_pipeline=2)),  # Megatron-Bridge#957
        *(
            Case("moe", sizes, recompute)
            for sizes in (dict(tensor=2), dict(pipeline=2), dict(context=2))
            for recompute in (Recompute.selective, Recompute.full)
        ),
        Case("deep", dict(pipeline=2, virtual_pipeline=2), Recompute.full),
    ],
    4: [
        Case("moe", dict(expert=2, tensor=2, expert_tensor=2)),
        Case("moe", dict(tensor=2, context=2, expert=4)),
        Case("moe", dict(pipeline=2, context=2, expert=2)),
        Case("moe", dict(pipeline=2, tensor=2, expert=2)),
        # Data parallelism fills up what is left of the four ranks.
        Case("moe", dict()),
        Case("moe", dict(tensor=2)),
        Case("moe", dict(context=2)),
        Case("moe", dict(expert=2)),
        Case("moe", dict(expert=4)),
        Case("moe", dict(context=4)),
        Case("moe", dict(tensor=2, context=2)),
        Case("moe", dict(expert=2, expert_tensor=2)),
        Case("moe", dict(context=2, expert_tensor=2)),
        Case("moe", dict(tensor=2, context=2, expert=2), Recompute.full),
        Case("wide", dict(tensor=4)),
        Case("wide", dict(tensor=4, expert=2, expert_tensor=2)),
        Case("deep", dict(pipeline=4)),
        Case("deep", dict(pipeline=2, virtual_pipeline=2)),
        Case("deep", dict(pipeline=2, virtual_pipeline=2, expert=2)),
        Case("deep", dict(pipeline=2, virtual_pipeline=2, context=2)),
        Case("dense", dict(tensor=2, pipeline=2)),
        Case("dense", dict(pipeline=2, context=2)),
        Case("tied", dict(tensor=2, pipeline=2)),
        Case("deep_tied", dict(pipeline=4)),
    ],
}


def make_models(directory: Path) -> None:
    for name, fields in MODELS.items():
        tiny_model(directory / name, **fields)


def samples() -> List[TrainSample]:
    return make_samples(7)


def compute(models: Path, run_dir: Path, case: Case) -> Dict[str, Any]:
    """Of this rank: `scores` and `stats` (the same on all), `gradients` and `weights` (of what it exports).

    The mask of mastered tokens is on: its sums cross context-parallel ranks. The last update has one sample, so that
    ranks without any take part.
    """
    mask = objective("dynamic", sigma=5.35, tau=2e-3)
    config = policy_config(models / case.model, run_dir, ParallelConfig(**case.sizes))
    config.policy.recompute = case.recompute
    config.policy.optimizer.eps = 1e-3  # Adam's own division by rounding noise is not what is compared
    policy = Policy(config)
    scores = policy.score(samples())
    stats = [policy.update(part, mask) for part in (samples(), samples(), samples()[:1])]
    weights = hf_weights(policy)
    read_out_gradients(config)
    policy = Policy(config)
    before = hf_weights(policy)
    policy.update(samples(), mask)
    after = hf_weights(policy)
    return {
        "scores": [asdict(s) for s in scores],
        "stats": [asdict(s) for s in stats],
        "weights": weights,
        "gradients": {name: before[name] - after[name] for name in before},
    }
