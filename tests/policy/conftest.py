from pathlib import Path

import pytest
import torch.distributed as dist

from tests.tiny_models import tiny_model


@pytest.fixture(scope="session", autouse=True)
def one_rank():
    """A process group of this process alone, left to the process's end: Megatron's groups hang on it."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """tiny(kind) -> path of a tiny model: moe, dense, tied."""
    made = {}

    def path(kind: str = "moe") -> Path:
        if kind not in made:
            made[kind] = tiny_model(tmp_path_factory.mktemp("models") / kind, kind)
        return made[kind]

    return path
