"""A tiny random model on a real server, whose responses end where the benchmark says: only scheduling differs."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Dict

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.tiny_models import tiny_model  # noqa: E402
from ulorl_megatron.config.schema import Config, Dtype  # noqa: E402
from ulorl_megatron.rollout.client import Finish, Generation  # noqa: E402
from ulorl_megatron.rollout.served_model import ServedModel  # noqa: E402
from ulorl_megatron.rollout.server_pool import ServerPool  # noqa: E402

PROMPT = 8  # tokens of a prompt
_NEVER = 2**20  # a stop id that no model makes


class ForcedPool(ServerPool):
    """A response ends after lengths[group] tokens, as if by EOS."""

    lengths: Dict[int, int]

    async def generate(self, input_ids, sampling, max_new_tokens, group=None, cut=None) -> Generation:
        so_far = len(input_ids) - PROMPT
        wanted = min(max_new_tokens, self.lengths[group] - so_far)
        part = await super().generate(input_ids, sampling, wanted, group, cut)
        ended = so_far + len(part.tokens) == self.lengths[group]
        return replace(part, finish=Finish.eos) if ended else part


def make_model(folder: Path) -> None:
    """Writes folder/model. Exits if there is anything in `folder`."""
    if folder.exists() and any(folder.iterdir()):
        sys.exit(f"{folder} is not empty")
    tiny_model(folder / "model", eos_token_id=None)


def served_model(folder: Path) -> ServedModel:
    return ServedModel(folder / "model", 272, frozenset({_NEVER}))


def forced_config(folder: Path, cap: int) -> Config:
    """Responses of at most `cap` tokens, in one segment."""
    config = Config()
    config.run.dir, config.model.path = str(folder / "run"), str(folder / "model")
    config.model.dtype = Dtype.float32
    config.data.max_prompt_length = PROMPT
    config.rollout.global_max_length, config.rollout.segment_count = cap, 1
    return config
