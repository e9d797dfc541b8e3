"""The evaluation sets of a configuration: data.eval may name one file, or several by name."""

from pathlib import Path
from typing import Dict, List

from ulorl_megatron.config.schema import DataConfig


def evaluation_sets(data: DataConfig) -> Dict[str, str]:
    """name -> file; a single file is called by its stem. Empty without data.eval."""
    if not data.eval:
        return {}
    return {Path(data.eval).stem: data.eval} if isinstance(data.eval, str) else dict(data.eval)


def faults(data: DataConfig) -> List[str]:
    """One line for each fault of data.eval."""
    if data.eval is None or isinstance(data.eval, str):
        return []
    if not isinstance(data.eval, dict):
        return [f"data.eval: {data.eval!r} is neither a file nor names of files"]
    found = []
    for name, file in data.eval.items():
        if not isinstance(file, str):
            found.append(f"data.eval.{name}: {file!r} is not the name of a file")
        if not _plain(str(name)):
            found.append(f"data.eval.{name}: a name is made of letters, digits, _ and -")
    return found


def _plain(name: str) -> bool:
    return name.replace("_", "").replace("-", "").isalnum()
