"""A file that grows by whole lines of JSON, and survives a kill."""

import json
from pathlib import Path
from typing import Any, Dict, Iterator


class Lines:
    """The file `path`, made if it is not there. Read it to its end once, before anything is added."""

    def __init__(self, path: Path):
        self._file = path.open("a+b")

    def read(self) -> Iterator[Dict[str, Any]]:
        """What is there; half a line that a kill left at the end is cut off."""
        self._file.seek(0)
        end = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            end += len(line)
            yield json.loads(line)
        self._file.truncate(end)

    def add(self, entry: Dict[str, Any]) -> None:
        """With the operating system when this returns."""
        self._file.write(json.dumps(entry, ensure_ascii=False).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()
