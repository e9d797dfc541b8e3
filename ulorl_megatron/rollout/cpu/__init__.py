"""What SGLang needs to serve on a machine without a GPU. With CUDA nothing of this is used.

`stubs/` stands in for packages that have no CPU build (see their docstrings). It goes on PYTHONPATH of the
server processes only; no other process ever sees it.
"""

from pathlib import Path
from typing import Dict, List

STUBS = Path(__file__).parent / "stubs"


def environment() -> Dict[str, str]:
    """Variables of a server process on a CPU, PYTHONPATH left out (it has to be merged)."""
    return {"SGLANG_USE_CPU_ENGINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def flags(context_length: int) -> List[str]:
    """Flags of sglang.launch_server on a CPU. context_length: tokens of the longest sample.

    The size of the KV cache is said, since by default the server takes most of the machine's memory for it. An idle
    server sleeps, since otherwise it would keep a core busy that the trainer could use.
    """
    kv_cache_tokens = max(65536, 2 * context_length)
    return [
        *("--device", "cpu"),
        *("--attention-backend", "torch_native"),
        *("--max-total-tokens", str(kv_cache_tokens)),
        "--sleep-on-idle",
    ]
