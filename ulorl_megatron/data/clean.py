"""Running a pipeline: step after step, each from the file of the one before; taken up again where it was killed.

OUT.partial/NN-name.jsonl         what a step kept; NN-name.dropped.jsonl what it did not
OUT.partial/NN-name.json          what it did, written last: a step that has it is not run again
OUT/data.jsonl or data.parquet    the result; dropped.jsonl, report.md, manifest.json and answers/ beside it
"""

import hashlib
import json
import shutil
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Tuple

from checkpoint_tools.publish import fsync_directory, lock_or_close, write_atomically, write_json
from ulorl_megatron.data.files import Row, line, read_rows, row_files, sha256, write_parquet, written
from ulorl_megatron.data.layouts import Dropped, Outcome, read_layout
from ulorl_megatron.data.pipeline import Pipeline
from ulorl_megatron.data.report import report
from ulorl_megatron.data.step import Workspace
from ulorl_megatron.errors import UserError

_EXAMPLES = 3  # of each reason, and of changed rows
_SECONDS_BETWEEN_LINES = 10.0
_LIBRARIES = ("ulorl-megatron", "datasketch", "math-verify", "numpy", "pyarrow", "tokenizers", "transformers", "xxhash")


@dataclass
class Record:
    """What one step did. read, kept, changed: rows. dropped: reason -> rows. examples: reason -> what was dropped for
    it, or under "changed" what was changed. files: what it depends on besides the rows, with SHA-256."""

    name: str
    fingerprint: str
    settings: Dict[str, Any]
    files: Dict[str, str]
    read: int
    kept: int
    changed: int
    dropped: Dict[str, int]
    examples: Dict[str, List[Dict[str, Any]]]


def clean(pipeline: Pipeline, *, force: bool = False) -> List[Record]:
    """Makes the folder pipeline.out, whole or not at all, and returns what each step did.

    Raises UserError if it is there (force: it is replaced, if it was made by this), if another process is at it, if a
    row cannot be read, and if no row is left.
    """
    out = pipeline.out
    _check_replaceable(out, force)
    with _locked(out.with_name(out.name + ".partial")) as work:
        if (out / "answers").is_dir():  # the result that is to be replaced: no model is asked again
            shutil.copytree(out / "answers", work / "answers", dirs_exist_ok=True)
        records = _run(pipeline, work)
        if not records[-1].kept:
            raise UserError(f"no row is left; {work}/*.dropped.jsonl say why")
        _publish(pipeline, work, records)
    shutil.rmtree(work)
    return records


def _check_replaceable(out: Path, force: bool) -> None:
    if not out.exists():
        return
    if not force:
        raise UserError(f"{out} exists already; give --force to replace it, or another out")
    if not (out / "manifest.json").is_file():
        raise UserError(f"{out} was not made by ulorl data (no manifest.json in it), so --force does not replace it")


@contextmanager
def _locked(work: Path) -> Iterator[Path]:
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as lock:
        lock_or_close(lock, UserError(f"{work}: another process is writing there; wait for it, or stop it"))
        yield work


def _run(pipeline: Pipeline, work: Path) -> List[Record]:
    inputs = [file for item in pipeline.inputs for file in row_files(Path(item.path))]
    steps = [("read", None, {"inputs": [asdict(item) for item in pipeline.inputs]}, inputs)]
    steps += [(name, step, asdict(step), list(step.files())) for name, step in pipeline.steps]
    records: List[Record] = []
    fingerprint = metadata.version("ulorl-megatron")
    before: Optional[Path] = None
    for i, (name, step, settings, files) in enumerate(steps):
        label = f"{i:02d}-{name}"
        hashes = {_name(file): sha256(file) for file in files}
        fingerprint = _digest([fingerprint, name, settings, hashes])
        record = _finished(work / f"{label}.json", fingerprint)
        if record is None:
            if step is None:
                rows = (pair for item in pipeline.inputs for pair in read_layout(Path(item.path), item.layout))
            else:
                rows = step.run((row for _, row in read_rows(before)), Workspace(work, name))
            total = records[-1].kept if records else None
            record = _step(work, label, rows, total, Record(name, fingerprint, settings, hashes, 0, 0, 0, {}, {}))
        print(_line(record), flush=True)
        records.append(record)
        before = work / f"{label}.jsonl"
    return records


def _step(work: Path, label: str, rows: Iterator[Tuple[Row, Outcome]], total: Optional[int], record: Record) -> Record:
    """Writes what the step keeps and drops, and then the record."""
    dropped: Counter = Counter()
    began = told = time.monotonic()
    with written(work / f"{label}.dropped.jsonl") as losses, written(work / f"{label}.jsonl") as kept:
        for row, outcome in rows:
            record.read += 1
            if isinstance(outcome, Dropped):
                dropped[outcome.reason] += 1
                losses.write(line({"step": record.name, **asdict(outcome), "row": row}))
                _note(record, outcome.reason, {"row": row, "detail": outcome.detail})
            else:
                record.kept += 1
                kept.write(line(outcome))
                if record.name != "read" and outcome != row:
                    record.changed += 1
                    _note(record, "changed", {"row": row, "became": outcome})
            now = time.monotonic()
            if now - told >= _SECONDS_BETWEEN_LINES:
                told = now
                of = f" of {total}" if total else ""
                speed = record.read / (now - began)
                print(f"{record.name}: {record.read}{of} rows, {speed:.1f} a second", file=sys.stderr, flush=True)
    record.dropped = dict(dropped.most_common())
    write_json(work / f"{label}.json", asdict(record))
    return record


def _note(record: Record, kind: str, example: Dict[str, Any]) -> None:
    examples = record.examples.setdefault(kind, [])
    if len(examples) < _EXAMPLES:
        examples.append(example)


def _finished(file: Path, fingerprint: str) -> Optional[Record]:
    """The record of a step that was done before on the very same rows and settings."""
    if not file.is_file():
        return None
    record = Record(**json.loads(file.read_text()))
    return record if record.fingerprint == fingerprint else None


def _line(record: Record) -> str:
    reasons = ", ".join(f"{reason} {count}" for reason, count in record.dropped.items())
    changed = f", changed {record.changed}" if record.changed else ""
    lost = f", dropped {record.read - record.kept}: {reasons}" if reasons else ""
    return f"{record.name:<18} {record.read:>8} -> {record.kept:>8}{changed}{lost}"


def _publish(pipeline: Pipeline, work: Path, records: List[Record]) -> None:
    """Puts the result together, and gives it its name."""
    result, out = work / "result", pipeline.out
    shutil.rmtree(result, ignore_errors=True)
    result.mkdir()
    labels = [f"{i:02d}-{record.name}" for i, record in enumerate(records)]
    data = result / f"data.{pipeline.format}"
    if pipeline.format == "parquet":
        write_parquet(data, work / f"{labels[-1]}.jsonl")
    else:
        shutil.copyfile(work / f"{labels[-1]}.jsonl", data)
    with written(result / "dropped.jsonl") as losses:
        for label in labels:
            with (work / f"{label}.dropped.jsonl").open(encoding="utf-8") as lines:
                shutil.copyfileobj(lines, losses)
    if (work / "answers").exists():
        shutil.copytree(work / "answers", result / "answers")
    manifest = {
        "pipeline": pipeline.described(),
        "steps": [{key: value for key, value in asdict(record).items() if key != "examples"} for record in records],
        "outputs": {file.name: sha256(file) for file in (data, result / "dropped.jsonl")},
        "versions": {"python": sys.version.split()[0]} | {name: metadata.version(name) for name in _LIBRARIES},
    }
    write_json(result / "manifest.json", manifest)
    write_atomically(result / "report.md", report(out.name, [asdict(record) for record in records]).encode())
    fsync_directory(result)
    replaced = out.with_name(out.name + ".replaced")
    if out.exists():
        out.rename(replaced)
    result.rename(out)
    fsync_directory(out.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def _name(file: Path) -> str:
    """How a file is called in the manifest; one of this package has no path that means anything elsewhere."""
    return file.name if file.is_relative_to(Path(__file__).parent) else str(file)


def _digest(facts: Any) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
