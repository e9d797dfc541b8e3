"""Imports the GPU stack and says what is missing or of another version than requirements.txt. Exit code 1 if any is.

python3 slurm/containers/check.py [--no-gpu]     --no-gpu: on a machine that only builds, where no GPU is to be seen
"""

import argparse
import importlib
import importlib.metadata
import importlib.util
import re
import sys
from pathlib import Path

# Distribution -> what of it this project, Megatron-Core or SGLang imports.
MODULES = {
    "torch": ["torch.distributed"],
    "transformers": ["transformers"],
    "megatron-core": ["megatron.core.models.gpt", "megatron.core.dist_checkpointing"],
    "sglang": ["sglang.srt.server_args", "sgl_kernel"],
    "transformer-engine": ["transformer_engine.pytorch"],
    "flash-attn": ["flash_attn.flash_attn_interface"],
}
OPTIONAL = {"apex": "apex.normalization"}
PIN = re.compile(r"^([\w-]+)(?:\[[\w,-]+\])?==(\S+)$", re.MULTILINE)


def pins(requirements: Path) -> dict[str, str]:
    """Distribution -> version."""
    return dict(PIN.findall(requirements.read_text()))


def fault(name: str, version: str) -> str:
    """What is wrong with a distribution; empty if nothing is."""
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "is not installed"
    if found.partition("+")[0] != version:
        return f"is {found}, not {version}"
    for module in MODULES[name]:
        try:
            importlib.import_module(module)
        except (ImportError, OSError, RuntimeError) as error:  # a library that is not there, or not of this CUDA
            return f"does not give {module}: {error!r}"
    return ""


def gpu_fault() -> str:
    try:
        import torch
    except ImportError as error:
        return repr(error)
    return "" if torch.cuda.is_available() else f"torch sees none (built for CUDA {torch.version.cuda})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-gpu", action="store_true")
    arguments = parser.parse_args()
    wanted = pins(Path(__file__).with_name("requirements.txt"))
    faults = {f"{name} {version}": fault(name, version) for name, version in wanted.items()}
    if not arguments.no_gpu:
        faults["GPU"] = gpu_fault()
    for what, wrong in faults.items():
        print(f"{'MISSING' if wrong else 'ok':8} {what}{': ' if wrong else ''}{wrong}")
    for name, module in OPTIONAL.items():
        there = importlib.util.find_spec(module.partition(".")[0]) is not None
        print(f"{'ok' if there else 'absent':8} {name} (optional)")
    return int(any(faults.values()))


if __name__ == "__main__":
    sys.exit(main())
