"""The `ulorl` command."""

import argparse
import logging
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import List, Optional

from checkpoint_tools.errors import CheckpointError
from ulorl_megatron import config as configuration
from ulorl_megatron.config.fit import check_fit
from ulorl_megatron.data import command as data_command
from ulorl_megatron.errors import UserError
from ulorl_megatron.evaluation import command as eval_command
from ulorl_megatron.plan import command as plan_command

_OVERRIDES = "settings on top of the file, as section.key=value"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ulorl", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    train = commands.add_parser(
        "train",
        help="run UloRL; the same command again resumes it",
        description="Runs UloRL as the configuration says. Started by torchrun, or by srun as one of several tasks, it "
        "is one of their ranks; otherwise it starts run.processes ranks on this machine. With a run directory that "
        "already holds a run it goes on from the last checkpoint. SIGUSR1 ends it with a checkpoint and exit code 75.",
    )
    serve = commands.add_parser(
        "serve",
        help="keep one SGLang server for a trainer on another machine",
        description="Starts one server with the flags that follow from the configuration, on a free port, starts it "
        "again when it dies, and announces it in run.dir to the trainer, which waits for servers.announced of them. "
        "Ends with SIGTERM or Ctrl-C.",
    )
    number_help = "of the server, from 0 on; in a Slurm step of the first task's, which the others follow (default: 0)"
    serve.add_argument("--number", type=int, default=0, metavar="N", help=number_help)
    serve.add_argument("--host", metavar="NAME", help="the name by which the trainer reaches this machine")
    show = commands.add_parser(
        "config",
        help="print the resolved configuration, or what is wrong with it",
        description="Prints the configuration with every default filled in, as YAML. Exit code 2 and one line per "
        "fault if it is not usable: by itself, on run.processes ranks, or, where model.path has a config.json, for "
        "that model.",
    )
    plan = commands.add_parser("plan", help="say whether the layout fits a GPU, and how fast it should be")
    plan.description = plan_command.DESCRIPTION
    plan_command.add_arguments(plan)
    evaluate = commands.add_parser("eval", help="say how right checkpoints are on held-out problems")
    evaluate.description = eval_command.DESCRIPTION
    eval_command.add_arguments(evaluate)
    data = commands.add_parser("data", help="make a training set: read, clean, rate problems")
    data.description = data_command.DESCRIPTION
    data_command.add_arguments(data)
    own = ((train, _train), (serve, _serve), (show, _config))
    for command, function in (*own, (plan, plan_command.run), (evaluate, eval_command.run)):
        command.add_argument("config", metavar="CONFIG.yaml")
        command.add_argument("overrides", metavar="key=value", nargs="*", help=_OVERRIDES)
        command.set_defaults(function=function)
    return parser


def _config(arguments: argparse.Namespace) -> int:
    config = configuration.load(arguments.config, arguments.overrides)
    check_fit(config, config.run.processes)
    print(configuration.to_yaml(config), end="")
    return 0


def _train(arguments: argparse.Namespace) -> int:
    from ulorl_megatron.launch import FOLLOWER_EXIT, STOPPED_EXIT, is_rank, slurm, start_ranks

    config = configuration.load(arguments.config, arguments.overrides)
    logs = Path(config.run.dir) / "logs"
    by_slurm = not is_rank() and slurm.is_task()
    if not is_rank() and not by_slurm:
        from ulorl_megatron.monitor import finished
        from ulorl_megatron.preflight import check

        if finished(config):
            return 0
        check(config)
        logs.mkdir(parents=True, exist_ok=True)
        command = ["-m", "ulorl_megatron.cli", "train", arguments.config, *arguments.overrides]
        return start_ranks(command, config.run.processes, logs)

    try:
        if by_slurm:
            slurm.take_place()
        check_fit(config, int(os.environ["WORLD_SIZE"]))  # a launcher's, whatever run.processes says
    except UserError:
        if os.environ["RANK"] == "0":
            raise
        return FOLLOWER_EXIT
    logs.mkdir(parents=True, exist_ok=True)
    log_to_file(logs / f"trainer-{os.environ['RANK']}.log")  # before the imports below, which warn of much

    from ulorl_megatron.launch import FirstRankFailed, Ranks
    from ulorl_megatron.train import train

    with slurm.meeting(Path(config.run.dir)) if by_slurm else nullcontext({}) as address:
        os.environ.update(address)
        try:
            with Ranks() as ranks:
                complete = train(config, ranks)
                if ranks.first and not complete:
                    print("stopped, as asked, with a checkpoint; the same command goes on from it", flush=True)
        except FirstRankFailed as error:
            print(error, file=sys.stderr)
            return FOLLOWER_EXIT
    return 0 if complete else STOPPED_EXIT


def _serve(arguments: argparse.Namespace) -> int:
    from ulorl_megatron.rollout.serve import serve

    config = configuration.load(arguments.config, arguments.overrides)
    return serve(config, arguments.number + int(os.environ.get("SLURM_PROCID", "0")), arguments.host)


def log_to_file(file: Path) -> None:
    """Sends the libraries' log records and Python warnings to `file`; the terminal is for progress and errors."""
    logging.basicConfig(
        filename=file, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", force=True
    )
    logging.captureWarnings(True)


def _parse(argv: Optional[List[str]]) -> argparse.Namespace:
    """The arguments; overrides may also stand behind options, where argparse leaves them over."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    unknown = [item for item in rest if item.startswith("-") or "=" not in item]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    arguments.overrides += rest
    return arguments


def main(argv: Optional[List[str]] = None) -> int:
    """Runs one command. What a person can mend becomes "error: ..." and exit code 2; the rest keeps its traceback."""
    arguments = _parse(argv)
    try:
        return arguments.function(arguments)
    except (UserError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
