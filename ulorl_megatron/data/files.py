"""Files of rows: JSONL, JSON and Parquet, read row by row; written whole or not at all."""

import hashlib
import json
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from typing import IO, Any, Dict, Iterable, Iterator, List, Tuple

import pyarrow as pa
import pyarrow.parquet as pq

from checkpoint_tools import publish
from ulorl_megatron.errors import UserError

Row = Dict[str, Any]

SUFFIXES = (".jsonl", ".json", ".parquet")
_BATCH = 1024  # rows of a Parquet file held at a time


def row_files(path: Path) -> List[Path]:
    """`path` itself, or all files of rows below it, sorted. Raises UserError if there is none."""
    if path.is_file():
        found = [path]
    elif path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.suffix in SUFFIXES)
    else:
        raise UserError(f"no data file {path}")
    if not found or found[0].suffix not in SUFFIXES:
        raise UserError(f"{path}: no file that ends in {', '.join(SUFFIXES)}")
    return found


def read_rows(path: Path) -> Iterator[Tuple[int, Any]]:
    """(number, row) of one file, in order; empty lines are no rows.

    number: line of a JSONL file, else row, from 1. A .json file holds a list of rows or one row, and is read at once.
    Raises UserError naming file and line for what cannot be read. Rows may be anything; see layouts.
    """
    if not path.is_file():
        raise UserError(f"no data file {path}")
    try:
        if path.suffix == ".parquet":
            yield from _parquet(path)
        elif path.suffix == ".json":
            content = json.loads(path.read_text(encoding="utf-8"))
            yield from enumerate(content if isinstance(content, list) else [content], start=1)
        else:
            yield from _lines(path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not valid JSON: {error}") from error
    except pa.ArrowInvalid as error:
        raise UserError(f"{path} is not a Parquet file that can be read: {error}") from error


def _lines(path: Path) -> Iterator[Tuple[int, Any]]:
    with path.open(encoding="utf-8", newline="\n") as lines:  # JSON allows U+2028 in a string: only \n ends a line
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{path}:{number}: not valid JSON: {error}") from error
            yield number, row


def _parquet(path: Path) -> Iterator[Tuple[int, Any]]:
    with pq.ParquetFile(path) as file:
        number = 0
        for batch in file.iter_batches(_BATCH):
            for row in batch.to_pylist():
                number += 1
                yield number, row


def line(row: Any) -> str:
    """The row as a line of a JSONL file. Raises UserError for values JSON has no form for (dates, bytes)."""
    try:
        return json.dumps(row, ensure_ascii=False) + "\n"
    except TypeError as error:
        raise UserError(f"a row of keys {', '.join(row)} cannot be written: {error}; leave that key out") from error


def written(path: Path) -> AbstractContextManager[IO[str]]:
    """A text file of lines to write, that gets its name once it is complete."""
    return publish.written(path, "w", encoding="utf-8", newline="\n")


def write_parquet(path: Path, source: Path) -> None:
    """The rows of the JSONL file `source` as Parquet; a key that some rows lack is null there.

    Raises UserError if a key has values of several types, as prompts that are strings here and messages there.
    """
    try:
        schema = pa.unify_schemas([table.schema for table in _tables(source)] or [pa.schema([])])
        with publish.written(path) as stream, pq.ParquetWriter(stream, schema) as writer:
            for table in _tables(source, schema):
                writer.write_table(table)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise UserError(f"{path}: a column has values of several types ({error}); write .jsonl instead") from error


def _tables(source: Path, schema: pa.Schema = None) -> Iterator[pa.Table]:
    rows = (row for _, row in read_rows(source))
    while batch := list(islice(rows, _BATCH)):
        if schema is None:
            yield pa.Table.from_pylist([{key: row.get(key) for key in _keys(batch)} for row in batch])
        else:
            yield pa.Table.from_pylist(batch, schema=schema)


def _keys(rows: Iterable[Row]) -> List[str]:
    """The keys of the rows, in the order they first come."""
    return list(dict.fromkeys(key for row in rows for key in row))


def sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
