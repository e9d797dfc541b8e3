"""What can be known before any process starts: files that are not there, ports that are taken."""

from pathlib import Path

from ulorl_megatron.config.schema import Config
from ulorl_megatron.errors import UserError
from ulorl_megatron.rollout.server import choose_ports


def check(config: Config) -> None:
    """Raises UserError naming the first thing that would stop the run minutes later. Writes nothing."""
    model = Path(config.model.path)
    if not (model / "config.json").is_file():
        raise UserError(f"model.path: {model} is not a Hugging Face model folder (no config.json in it)")
    if not any(model.glob("*.safetensors")):
        raise UserError(f"model.path: {model} holds no *.safetensors weights")
    for key, file in (("data.train", config.data.train), ("data.eval", config.data.eval)):
        if file is not None and not Path(file).is_file():
            raise UserError(f"{key}: no file {file}")
    if config.servers.port and not config.servers.urls:
        choose_ports(config.servers.port, config.servers.count)
