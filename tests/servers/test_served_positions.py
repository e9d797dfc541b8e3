"""YaRN of the configuration in a real SGLang server, against transformers on the folder that is exported."""

import json
import time
import urllib.error
import urllib.request

import pytest
import torch
from transformers import AutoModelForCausalLM

from checkpoint_tools.companions import copy_companions
from tests.conftest import tiny_config
from tests.tiny_models import tiny_model
from ulorl_megatron.config.positions import changed_fields, context_length
from ulorl_megatron.rollout import server

PROMPT = list(range(20))
POSITIONS = 144  # 1.5 x 96


def post(url, **payload):
    request = urllib.request.Request(url, json.dumps(payload).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)


def wait_until_ready(process):
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        process.check_alive()
        try:
            urllib.request.urlopen(f"{process.url}/health", timeout=30).close()
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    raise AssertionError(process.log_tail())


@pytest.mark.slow
def test_a_server_scales_positions_as_the_exported_config_says(tmp_path):
    model = tiny_model(tmp_path / "model", "moe", max_position_embeddings=96)
    config = tiny_config(tmp_path / "run", model)
    config.data.max_prompt_length = len(PROMPT)
    config.rollout.global_max_length = POSITIONS - len(PROMPT) - 6
    assert context_length(config) == POSITIONS
    config.model.yarn_factor, config.model.yarn_original = 1.5, 96
    (port,) = server.choose_ports(0, 1)
    url = f"http://{server.HOST}:{port}"
    process = server.LocalServer(server.command(config, 0, port), url, tmp_path / "server.log")
    process.start()
    try:
        wait_until_ready(process)
        sampling = {"temperature": 1.0, "max_new_tokens": config.rollout.global_max_length, "ignore_eos": True}
        answer = post(f"{url}/generate", input_ids=PROMPT, sampling_params=sampling, return_logprob=True)
    finally:
        process.stop()
    tokens = answer["output_ids"]
    served = torch.tensor([entry[0] for entry in answer["meta_info"]["output_token_logprobs"]])
    assert len(tokens) == config.rollout.global_max_length  # beyond the 96 of the model's own config.json

    exported = tmp_path / "exported"
    copy_companions(model, exported, torch.float32, changed_fields(config.model))
    (exported / "model.safetensors").symlink_to(model / "model.safetensors")
    torch.testing.assert_close(served, log_probs(exported, tokens), atol=2e-5, rtol=0)
    assert (served - log_probs(model, tokens)).abs().max() > 1e-2  # scaling does something here


def log_probs(path, tokens):
    """Of the tokens after PROMPT, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + tokens])).logits[0, len(PROMPT) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
