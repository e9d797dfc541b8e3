"""TensorBoard itself, in a browser: the charts are there and have lines."""

import asyncio
import os
import shutil
import socket
import subprocess
import sys

import aiohttp
import pytest

from tests.conftest import tiny_config
from tests.monitor.browser import open_page
from ulorl_megatron.monitor import Monitor
from ulorl_megatron.monitor.dashboard import CHARTS
from ulorl_megatron.monitor.metrics import METRICS

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")

# What stands on the page, and how many lines are drawn, through the shadow roots that TensorBoard is built of.
LOOK = """(() => {
  const texts = []; let lines = 0;
  const walk = node => {
    if (node.nodeType === 3 && node.parentNode.tagName !== 'STYLE') texts.push(node.textContent.trim());
    if (node.tagName === 'path' && (node.getAttribute('d') || '').includes('L')) lines += 1;
    if (node.shadowRoot) walk(node.shadowRoot);
    node.childNodes.forEach(walk);
  };
  walk(document.body);
  return {texts: texts.filter(text => text), lines: lines};
})()"""


@pytest.fixture
def logdir(tmp_path):
    config = tiny_config(tmp_path / "run", tmp_path / "model")
    config.data.train = "train.jsonl"
    with Monitor(config) as monitor:
        monitor.resume(0)
        for step in (1, 2, 3):
            monitor.step(step, {name: step + i / 64 for i, name in enumerate(METRICS) if "eval/" not in name})
    return tmp_path / "run" / "tensorboard"


async def look(url, profile):
    """(texts, lines) of the page once all charts have their titles and the first ones their lines."""
    titles = {title for charts in CHARTS.values() for title in charts}
    async with aiohttp.ClientSession() as session, asyncio.timeout(120):
        while True:
            try:
                async with session.get(f"{url}/data/plugins_listing"):
                    break
            except aiohttp.ClientError:
                await asyncio.sleep(0.2)
    async with open_page(CHROMIUM, profile) as page:
        await page.call("Page.navigate", url=f"{url}/#custom_scalars")
        for _ in range(120):
            await asyncio.sleep(0.5)
            seen = await page.evaluate(LOOK)
            if titles <= set(seen["texts"]) and seen["lines"] >= 2:
                break
        return set(seen["texts"]), seen["lines"]


@pytest.mark.skipif(CHROMIUM is None and "CI" not in os.environ, reason="needs chromium; CI has it")
def test_the_charts_are_drawn(logdir, tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", logdir, "--host", "127.0.0.1", "--port", str(port)]
    with (tmp_path / "tensorboard.log").open("w") as log:
        tensorboard = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        texts, lines = asyncio.run(look(f"http://127.0.0.1:{port}", tmp_path / "profile"))
    finally:
        tensorboard.kill()
        tensorboard.wait()
    for question, charts in CHARTS.items():
        assert question in texts and charts.keys() <= texts, question
    assert lines >= 2  # of the first chart: reward/complete and reward/issued
