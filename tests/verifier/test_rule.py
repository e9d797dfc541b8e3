"""The worker pool: a judge that hangs or crashes is replaced, and gives no reward (verl#5635, #5839)."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from ulorl_megatron.config.schema import VerifierConfig
from ulorl_megatron.errors import UserError
from ulorl_megatron.verifier import By, RuleVerifier, Verdict, VerifierFailed, build_verifier

FAULTY = "tests.verifier.faulty_judge"


@contextmanager
def pool(workers=1, timeout_s=30.0, retries=0, module=FAULTY):
    verifier = RuleVerifier(workers=workers, timeout_s=timeout_s, retries=retries, module=module)
    try:
        yield verifier
    finally:
        asyncio.run(verifier.close())


def verify(verifier, given, answer="1"):
    return asyncio.run(verifier.compare(given, answer))


@pytest.fixture(scope="module")
def mathematics():
    verifier = build_verifier(VerifierConfig(workers=2, timeout_s=30.0))
    yield verifier
    asyncio.run(verifier.close())


def test_many_answers_at_once_each_get_their_own_reward(mathematics):
    async def all_of_them():
        return await asyncio.gather(
            *(
                mathematics.verify(question="?", response=rf"\boxed{{{i}}}" if i else "", answer=str(i % 16))
                for i in range(64)
            )
        )

    right, wrong, none = Verdict(1.0, By.rule), Verdict(0.0, By.rule), Verdict(0.0, By.no_answer)
    assert asyncio.run(all_of_them()) == [none] + [right] * 15 + [wrong] * 48


def test_works_off_the_main_thread(mathematics):
    """Time limits by signals fail there, and were taken for wrong answers (verl#5635)."""
    rewards = []
    thread = threading.Thread(
        target=lambda: rewards.append(verify(mathematics, r"\frac{1}{2}", "0.5"))
    )
    thread.start()
    thread.join()
    assert rewards == [1.0]


def test_an_expression_that_hangs_math_verify_is_failed_not_wrong():
    """9^9^9^... never ends, in native code that no exception can interrupt."""
    with pool(timeout_s=1.0, module="ulorl_megatron.verifier.mathematics") as verifier:
        with pytest.raises(VerifierFailed, match="no reward after 1 s"):
            verify(verifier, "9^{9^{9^{9^{9}}}}", "25")
        assert verify(verifier, "25", "25") == 1.0


def test_hung_worker_is_killed_and_replaced():
    with pool(timeout_s=0.5) as verifier:
        hung = int(verify(verifier, "pid"))
        with pytest.raises(VerifierFailed, match="no reward after"):
            verify(verifier, "hang")
        with pytest.raises(ProcessLookupError):
            os.kill(hung, 0)
        assert int(verify(verifier, "pid")) != hung
        assert verify(verifier, "1") == 1.0


@pytest.mark.parametrize(("fault", "code"), [("crash", 3), ("raise", 1)])
def test_crash_is_failed_and_replaced(fault, code):
    with pool(retries=1) as verifier:
        with pytest.raises(VerifierFailed, match=rf"2 tries.*exit code {code}"):
            verify(verifier, fault)
        assert verify(verifier, "1") == 1.0


def test_retry_after_a_crash_gives_the_reward(tmp_path):
    with pool(retries=1) as verifier:
        assert verify(verifier, f"once {tmp_path / 'tried'}") == 1.0


def test_unjudgeable_is_not_tried_again_and_keeps_the_worker():
    with pool(retries=5) as verifier:
        before = verify(verifier, "pid")
        with pytest.raises(VerifierFailed, match="no value"):
            verify(verifier, "unjudgeable")
        assert verify(verifier, "pid") == before


def test_other_answers_go_on_while_one_hangs():
    async def both(verifier):
        hanging = asyncio.ensure_future(verifier.compare("hang", "1"))
        await asyncio.sleep(0)
        rewards = [await verifier.compare(str(i), "1") for i in range(3)]
        assert not hanging.done()
        with pytest.raises(VerifierFailed):
            await hanging
        return rewards

    with pool(workers=2, timeout_s=5.0) as verifier:
        assert asyncio.run(both(verifier)) == [0.0, 1.0, 0.0]


def test_a_judge_that_does_not_start_stops_the_run():
    """Not VerifierFailed: every sample would be failed, or hold for ever (NeMo-Gym#1351)."""
    with pool(module="tests.verifier.faulty_start") as verifier:
        for _ in range(2):
            with pytest.raises(UserError, match="exit code 5"):
                verify(verifier, "1")
        with pytest.raises(UserError, match="exit code 5"):
            asyncio.run(verifier.ready())


def test_close_leaves_no_process():
    with pool() as verifier:
        worker = int(verify(verifier, "pid"))
    with pytest.raises(ProcessLookupError):
        os.kill(worker, 0)


PARENT = """
import asyncio, os, signal, threading, time
from ulorl_megatron.verifier import RuleVerifier

def verify(response):
    return asyncio.run(verifier.compare(response, ""))

if __name__ == "__main__":
    verifier = RuleVerifier(workers=1, timeout_s=2.0, retries=0, module="tests.verifier.faulty_judge")
    print(int(verify("pid")), flush=True)
    if DURING == "hang":
        threading.Thread(target=verify, args=["hang"]).start()
        time.sleep(0.5)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("during", ["idle", "hang"])
def test_workers_end_with_their_parent(tmp_path, during):
    """kill -9 of the trainer leaves no judge behind, not even a hung one."""
    script = tmp_path / "trainer.py"
    script.write_text(f"DURING = {during!r}\n{PARENT}")
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    parent = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment)
    worker = int(parent.stdout)
    deadline = time.monotonic() + 60
    while _state(worker) != "Z":
        assert time.monotonic() < deadline, f"worker {worker} lives on"
        time.sleep(0.05)


def _state(pid):
    """The letter of /proc; Z also for a process that is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"
