"""`ulorl data`: making a training set out of what there is."""

import argparse
import sys
from pathlib import Path
from typing import List

from ulorl_megatron.errors import UserError
from ulorl_megatron.verifier import bench as bench_command

DESCRIPTION = "Reads problems of many layouts, cleans them, and writes them for `ulorl train` and `ulorl eval`."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="data_command", required=True, metavar="COMMAND")

    clean = commands.add_parser("clean", help="run a pipeline of steps; the same command again goes on after a kill")
    clean.add_argument("pipeline", metavar="PIPELINE.yaml")
    clean.add_argument("--force", action="store_true", help="replace the folder `out`")
    _finish(clean, _clean, "settings on top of the file, as out=... or inputs[0].path=...")

    step = commands.add_parser("step", help="run one step of a pipeline on one file")
    step.add_argument("name", metavar="STEP", help="its name; a wrong one lists all")
    step.add_argument("input", metavar="FILE")
    step.add_argument("--layout", default="rows", help="of FILE (default: rows)")
    step.add_argument("--out", required=True, metavar="FOLDER")
    step.add_argument("--force", action="store_true", help="replace FOLDER")
    _finish(step, _step, "settings of the step")

    convert = commands.add_parser("convert", help="read a layout and write rows of prompt and answer")
    convert.add_argument("input", metavar="FILE", help="a file, or a folder of files")
    convert.add_argument("--layout", required=True, help="of FILE; a wrong one lists all")
    convert.add_argument("--out", required=True, type=Path, metavar="FILE", help="ends in .jsonl or .parquet")
    convert.add_argument("--force", action="store_true", help="replace the file")
    convert.set_defaults(function=_convert, overrides=[])

    bench_command.add_arguments(commands.add_parser("verify-bench", help="measure verifiers on labelled pairs"))


def _finish(parser: argparse.ArgumentParser, function, help: str) -> None:
    parser.add_argument("overrides", metavar="key=value", nargs="*", help=help)
    parser.set_defaults(function=function)


def _clean(arguments: argparse.Namespace) -> int:
    from ulorl_megatron.data.clean import clean
    from ulorl_megatron.data.pipeline import load_pipeline

    pipeline = load_pipeline(arguments.pipeline, arguments.overrides)
    clean(pipeline, force=arguments.force)
    print(f"{pipeline.out}: data.{pipeline.format}, dropped.jsonl, report.md, manifest.json")
    return 0


def _step(arguments: argparse.Namespace) -> int:
    from ulorl_megatron.data.clean import clean
    from ulorl_megatron.data.pipeline import build_pipeline

    settings = _settings(arguments.overrides)
    steps: List = [{arguments.name: settings}]
    given = {"out": arguments.out, "inputs": [{"path": arguments.input, "layout": arguments.layout}], "steps": steps}
    pipeline = build_pipeline(given, f"ulorl data step {arguments.name}")
    clean(pipeline, force=arguments.force)
    print(f"{pipeline.out}: data.jsonl, dropped.jsonl, report.md, manifest.json")
    return 0


def _settings(items: List[str]) -> dict:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist(items))
    except (OmegaConfBaseException, YAMLError, ValueError) as error:
        raise UserError(f"settings {' '.join(items)}: {str(error).splitlines()[0]}") from error


def _convert(arguments: argparse.Namespace) -> int:
    from ulorl_megatron.data.files import line, write_parquet, written
    from ulorl_megatron.data.layouts import LAYOUTS, Dropped, read_layout

    out: Path = arguments.out
    if arguments.layout not in LAYOUTS:
        raise UserError(f"--layout: {arguments.layout!r}; take one of {', '.join(LAYOUTS)}")
    if out.suffix not in (".jsonl", ".parquet"):
        raise UserError(f"--out: {out} ends in neither .jsonl nor .parquet")
    if out.exists() and not arguments.force:
        raise UserError(f"{out} exists already; give --force to replace it")
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = out if out.suffix == ".jsonl" else out.with_name(out.name + ".rows.jsonl")
    kept, dropped = 0, []
    with written(rows) as stream:
        for row, outcome in read_layout(Path(arguments.input), arguments.layout):
            if isinstance(outcome, Dropped):
                dropped.append({"reason": outcome.reason, "detail": outcome.detail, "row": row})
            else:
                kept += 1
                stream.write(line(outcome))
    if rows is not out:
        write_parquet(out, rows)
        rows.unlink()
    if dropped:
        losses = out.with_name(out.name + ".dropped.jsonl")
        with written(losses) as stream:
            stream.writelines(map(line, dropped))
        print(f"{len(dropped)} rows have no usable answer: {losses}", file=sys.stderr)
    print(f"{out}: {kept} rows")
    return 0
