"""`ulorl-ckpt`: convert, inspect and compare checkpoints."""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from checkpoint_tools.convert import SHARD_BYTES, Options, hf_to_megatron, megatron_to_hf
from checkpoint_tools.errors import CheckpointError
from checkpoint_tools.progress import ConversionProgress
from checkpoint_tools.proof import CERTIFICATE_NAME
from checkpoint_tools.report import hf_plan_source, inspect_lines, plan_lines
from checkpoint_tools.sources import HFSource, Source, TorchDistSource, open_checkpoint
from checkpoint_tools.verify import compare

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_SHOWN_DIFFERENCES = 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 done (verify: equal), 1 verify found differences, 2 an error, 130 interrupted."""
    args = _parser().parse_args(arguments)
    torch.set_num_threads(1)  # the threads are the workers
    try:
        return args.run(args)
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("interrupted; a conversion goes on when the same command is given again", file=sys.stderr)
        return 130


def _convert(args: argparse.Namespace) -> int:
    options = Options(_DTYPES.get(args.dtype), args.workers, args.shard_size, args.force)
    if args.dry_run:
        source = open_checkpoint(args.source, args.hf_config) if args.to_hf else hf_plan_source(args.source)
        _expect(source, args)
        print(*plan_lines(source, options, to_hf=args.to_hf), sep="\n")
        return 0
    source = open_checkpoint(args.source, args.hf_config)
    _expect(source, args)
    convert = megatron_to_hf if args.to_hf else hf_to_megatron
    with ConversionProgress(args.out.name) as progress:
        convert(source, args.out, options, progress)
    elements = sum(weight.numel for weight in source.weights)
    print(f"{args.out}: {len(source.weights):,} parameters, {elements:,} elements; see {CERTIFICATE_NAME}")
    return 0


def _expect(source: Source, args: argparse.Namespace) -> None:
    if isinstance(source, HFSource if args.to_hf else TorchDistSource):
        other = "hf-to-megatron" if args.to_hf else "megatron-to-hf"
        raise CheckpointError(f"{args.source}: is of the other kind; use {other}.")


def _inspect(args: argparse.Namespace) -> int:
    print(*inspect_lines(args.checkpoint, args.hf_config, tensors=args.tensors), sep="\n")
    return 0


def _verify(args: argparse.Namespace) -> int:
    a, b = (open_checkpoint(path, args.hf_config) for path in (args.a, args.b))
    result = compare(a, b, args.workers)
    if not result.differences:
        print(f"bit-equal: {result.tensors:,} tensors, {result.elements:,} elements")
        return 0
    print(f"different: {len(result.differences):,} of {result.tensors:,} tensors")
    for difference in result.differences[:_SHOWN_DIFFERENCES]:
        print(f"  {difference.name}: {difference.reason}")
    if len(result.differences) > _SHOWN_DIFFERENCES:
        print(f"  and {len(result.differences) - _SHOWN_DIFFERENCES:,} more")
    return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ulorl-ckpt", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    for name, to_hf, text in (
        ("hf-to-megatron", False, "HF directory to a torch_dist checkpoint, loadable at any parallel layout"),
        ("megatron-to-hf", True, "torch_dist checkpoint of any parallel layout to an HF directory"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.set_defaults(run=_convert, to_hf=to_hf, shard_size=SHARD_BYTES, hf_config=None)
        command.add_argument("source", type=Path, metavar="CKPT" if to_hf else "HF_DIR")
        command.add_argument("out", type=_directory, metavar="OUT", help="directory to make")
        command.add_argument("--dtype", choices=_DTYPES, help="convert to this dtype (default: keep)")
        command.add_argument("--dry-run", action="store_true", help="print the plan and write nothing")
        command.add_argument("--force", action="store_true", help="replace OUT")
        _add_workers(command)
        if to_hf:
            command.add_argument(
                "--shard-size", type=_size, metavar="SIZE", help="of one safetensors file (default: 5GB)"
            )
            _add_config(command)

    command = commands.add_parser("inspect", help="what a checkpoint is")
    command.set_defaults(run=_inspect)
    command.add_argument("checkpoint", type=Path)
    command.add_argument("--tensors", action="store_true", help="list every tensor")
    _add_config(command)

    command = commands.add_parser("verify", help="compare two checkpoints of either kind, bit for bit")
    command.set_defaults(run=_verify)
    command.add_argument("a", type=Path)
    command.add_argument("b", type=Path)
    _add_workers(command)
    _add_config(command)
    return parser


def _add_workers(command: argparse.ArgumentParser) -> None:
    cores = len(os.sched_getaffinity(0))
    command.add_argument(
        "--workers", type=_positive, default=cores, metavar="N", help=f"threads (default: the cores, {cores})"
    )


def _add_config(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--hf-config",
        type=Path,
        metavar="HF_DIR",
        help="where config.json and tokenizer are, for a torch_dist checkpoint without an hf/ directory",
    )


def _directory(text: str) -> Path:
    return Path(text).absolute()


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*([A-Z]*)", text.upper())
    if match is None or match[2] not in _UNITS or int(match[1]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 5GB or 500MiB")
    return int(match[1]) * _UNITS[match[2]]


if __name__ == "__main__":
    sys.exit(main())
