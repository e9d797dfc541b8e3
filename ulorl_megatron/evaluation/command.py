"""`ulorl eval`: arguments, and what it does with them."""

import argparse
from pathlib import Path

from ulorl_megatron.config import load
from ulorl_megatron.config.sets import evaluation_sets
from ulorl_megatron.errors import UserError

DESCRIPTION = (
    "Samples evaluation.samples_per_prompt responses to every problem of data.eval, judges them, and says how right "
    "they are and how sure that is. With several checkpoints: side by side, each tested against the first. Responses "
    "are kept as they come; the same command again goes on, and makes the report anew."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `ulorl eval`, besides the configuration and its overrides."""
    parser.add_argument(
        "--checkpoint",
        action="append",
        default=[],
        metavar="DIR",
        help="a Hugging Face folder, a checkpoint of a run, or a run directory (its latest); several times: compared "
        "with the first one (default: model.path)",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="where results go (default: run.dir/evaluation)")
    parser.add_argument("--force", action="store_true", help="throw away responses in --out made by other settings")


def run(arguments: argparse.Namespace) -> int:
    """0 when all is evaluated. Raises UserError for what stands in the way."""
    config = load(arguments.config, arguments.overrides)
    if not Path(config.model.path, "config.json").is_file():
        raise UserError(f"model.path: {config.model.path} is not a Hugging Face model folder (no config.json in it)")
    if not evaluation_sets(config.data):
        raise UserError("data.eval: names no file; give one, or several as {name: file}")
    from checkpoint_tools.publish import write_atomically, write_json
    from ulorl_megatron.evaluation import report
    from ulorl_megatron.evaluation.checkpoints import find_checkpoints
    from ulorl_megatron.evaluation.examination import examine

    checkpoints = find_checkpoints(arguments.checkpoint, config.model.path)
    out: Path = arguments.out or Path(config.run.dir) / "evaluation"
    table = examine(config, checkpoints, out, force=arguments.force)
    text = report.markdown(config, table, checkpoints)
    write_json(out / "results.json", report.as_data(table, checkpoints))
    write_atomically(out / "report.md", text.encode())
    report.write_tensorboard(out / "tensorboard", table, checkpoints, text)
    print(text)
    print(f"{out}: report.md, results.json, responses/, tensorboard/")
    return 0
