"""`ulorl eval` on a real SGLang server: killed in the middle, gone on with, two checkpoints of both kinds compared."""

import json
import signal
import subprocess
import sys
import time

import pytest

from checkpoint_tools.cli import main as ckpt
from tests.tiny_models import tiny_model
from ulorl_megatron.cli import main

K = 8


def lines(file):
    return (
        [line for line in file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")] if file.exists() else []
    )


@pytest.mark.slow
def test_a_kill_and_two_checkpoints(sglang_server, tmp_path, capsys):
    other = tmp_path / "step-000003"
    assert ckpt(["hf-to-megatron", str(tiny_model(tmp_path / "hf", "moe", seed=1)), str(other)]) == 0
    sums = tmp_path / "sums.jsonl"
    sums.write_text("".join(json.dumps({"prompt": f"{i}+1", "answer": str(i + 1)}) + "\n" for i in range(12)))
    config = tmp_path / "config.yaml"
    config.write_text(
        f"run: {{dir: {tmp_path}/run}}\nmodel: {{path: {sglang_server.model_path}, dtype: float32}}\n"
        f"data: {{train: none, eval: {sums}, max_prompt_length: 64}}\nverifier: {{workers: 1}}\n"
        f"rollout: {{global_max_length: 64, segment_count: 4}}\nservers: {{urls: ['{sglang_server.url}']}}\n"
        # Few at a time, so that the kill comes in the middle.
        f"evaluation: {{samples_per_prompt: {K}}}\n"
    )
    command = ["eval", str(config), "--checkpoint", str(sglang_server.model_path), "--checkpoint", str(other)]
    file = tmp_path / "run" / "evaluation" / "responses" / sglang_server.model_path.name / "sums.jsonl"
    slowly = ["rollout.prompts_per_step=1", "rollout.group_size=8"]
    running = subprocess.Popen([sys.executable, "-m", "ulorl_megatron.cli", *command, *slowly])
    deadline = time.monotonic() + 120
    while len(lines(file)) < 2 * K and time.monotonic() < deadline:
        time.sleep(0.05)
    running.send_signal(signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL
    before = lines(file)
    assert 2 * K <= len(before) < 12 * K

    assert main(command) == 0
    after = lines(file)
    assert after[: len(before)] == before and len(after) == 12 * K
    results = json.loads((tmp_path / "run" / "evaluation" / "results.json").read_text())
    assert [c["step"] for c in results["checkpoints"]] == [None, 3]
    for result in results["results"]:
        assert result["problems"] == 12 and result["attempts_each"] == K and 0 < result["lengths"]["max"] <= 64
        assert result["accuracy"]["low"] <= result["accuracy"]["value"] <= result["accuracy"]["high"]
        # A random model ends by chance or not at all; what did not end was cut at the limit.
        attempts = [json.loads(line) for line in lines(file.parents[1] / result["checkpoint"] / "sums.jsonl")]
        assert {a["tokens"] for a in attempts if not a["finished"]} <= {64}
    (comparison,) = results["comparisons"]
    assert comparison["second"] == "step-000003" and 0 < comparison["p_value"] <= 1
    texts = [
        {json.loads(line)["response"] for line in lines(file.parents[1] / label / "sums.jsonl")}
        for label in (sglang_server.model_path.name, "step-000003")
    ]
    assert not texts[0] & texts[1]  # the second's weights did reach the server
