"""What can be known before any process starts: files that are not there, a layout that cannot work, taken ports."""

from importlib.util import find_spec
from pathlib import Path

import torch

from ulorl_megatron.config.fit import check_fit
from ulorl_megatron.config.schema import Config, TransformerImpl
from ulorl_megatron.config.sets import evaluation_sets
from ulorl_megatron.errors import UserError
from ulorl_megatron.rollout.server import choose_ports


def check(config: Config) -> None:
    """Raises UserError naming what would stop the run minutes later, where run.processes ranks start on this machine.

    Writes nothing.
    """
    cards = torch.cuda.device_count()
    if 0 < cards < config.run.processes:
        raise UserError(
            f"run.processes: {config.run.processes} ranks, but this machine has {cards} GPUs; start the run on all its "
            "machines by torchrun or Slurm"
        )
    _check_gpu_options(config, cards)
    model = Path(config.model.path)
    if not (model / "config.json").is_file():
        raise UserError(f"model.path: {model} is not a Hugging Face model folder (no config.json in it)")
    if not any(model.glob("*.safetensors")):
        raise UserError(f"model.path: {model} holds no *.safetensors weights")
    evaluated = {f"data.eval, {name}": file for name, file in evaluation_sets(config.data).items()}
    for key, file in ({"data.train": config.data.train} | evaluated).items():
        if not Path(file).is_file():
            raise UserError(f"{key}: no file {file}")
    check_fit(config, config.run.processes)
    if config.servers.port and not config.servers.urls and not config.servers.announced:
        choose_ports(config.servers.port, config.servers.count)


def _check_gpu_options(config: Config, cards: int) -> None:
    te = config.policy.transformer_impl is TransformerImpl.te
    if not cards:
        for asked, key, instead in (
            (te, "policy.transformer_impl: te", "local"),
            (config.policy.optimizer.offload, "policy.optimizer.offload: true", "false"),
        ):
            if asked:
                raise UserError(f"{key} is for a GPU, and this machine has none; set it to {instead}")
    elif te and find_spec("transformer_engine") is None:
        raise UserError(
            "policy.transformer_impl: te needs Transformer Engine, which is not installed; install the extra `te`, or "
            "set it to local"
        )
