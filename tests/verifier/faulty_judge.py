"""A judge whose faults the tests choose: the given answer names one. Imported by worker processes."""

import os
import time
from pathlib import Path

from ulorl_megatron.verifier.worker import Unjudgeable


def warm_up() -> None:
    pass


def judge(given: str, answer: str) -> float:
    fault, _, argument = given.partition(" ")
    if fault == "once":  # "once FILE": crashes the first time
        if not Path(argument).exists():
            Path(argument).touch()
            os._exit(3)
        return 1.0
    if fault == "crash":
        os._exit(3)
    if fault == "hang":
        time.sleep(3600)
    if fault == "raise":
        raise RuntimeError("the judge has a bug")
    if fault == "unjudgeable":
        raise Unjudgeable("no value")
    if fault == "pid":
        return float(os.getpid())
    return float(given == answer)
