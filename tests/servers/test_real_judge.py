"""A real SGLang server as the judge: its random weights say nothing, and nothing is not 0."""

import asyncio

import pytest

from tests.conftest import tiny_config
from ulorl_megatron.config.schema import JudgeConfig
from ulorl_megatron.rollout.server import HOST, LocalServer, choose_ports, command
from ulorl_megatron.verifier import GenerativeVerifier, UnknownVerdict
from ulorl_megatron.verifier.tally import Tally

_START_S = 300.0


@pytest.fixture
def server(tiny_moe, tmp_path):
    """A server as people start one for a judge: with its tokenizer, which the policy's own servers lack."""
    config = tiny_config(tmp_path, tiny_moe)
    config.data.max_prompt_length = 1600  # its tokenizer makes a token of each byte
    (port,) = choose_ports(0, 1)
    line = [word for word in command(config, 0, port) if word != "--skip-tokenizer-init"]
    server = LocalServer(line, f"http://{HOST}:{port}", tmp_path / "judge.log")
    server.start()
    yield server
    server.stop()


@pytest.mark.slow
def test_nonsense_is_unknown_and_counted(server, capsys):
    """Asked while the server still starts, so that it is waited for first."""
    config = JudgeConfig(url=f"{server.url}/v1", votes=3, temperature=1.0, max_tokens=32, hold_s=_START_S)

    async def ask():
        verifier, tally = GenerativeVerifier(config), Tally()
        try:
            waiting = asyncio.create_task(verifier.ready())
            while not waiting.done():
                server.check_alive()
                await asyncio.wait({waiting}, timeout=1.0)
            waiting.result()
            for given in ("0.27m", "27m", r"\frac{27}{100}"):
                verdict = verifier.verify(question="How far?", response=rf"\boxed{{{given}}}", answer="27cm")
                with pytest.raises(UnknownVerdict, match="0 votes for, 0 against, 3 unknown"):
                    await tally.reward(verdict)
            return tally.metrics()
        finally:
            await verifier.close()

    counted = asyncio.run(ask())
    assert counted.pop("verifier/unknown") == 3 and not any(counted.values())
    assert "answers again" in capsys.readouterr().out
