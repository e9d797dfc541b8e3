"""The log-prob head (policy/head.py) against full logits: memory and time of forward and backward.

    python benchmarks/head.py [--tokens 2048] [--hidden 512] [--dtype float32] [--chunk 1024] [--repeat 3]

The plain way is logits, log_softmax, the labels' log-probs with graph and entropies without, over the 151,936 words of
Qwen3. Every run is a process of its own. Memory is the peak of its resident set over forward and backward, beyond the
inputs, the scores and the gradients. Time is that of its CPU, the least of the repeats: other processes disturb it less
than the clock. `masked` leaves 30 % of the tokens without a gradient, as the mask of mastered tokens does.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Tuple

WORDS, TEMPERATURE = 151_936, 0.85
WAYS = ("plain", "head", "plain masked", "head masked")


def run(way: str, args: argparse.Namespace) -> None:
    """One measurement in this process; prints CPU seconds, bytes and two checksums."""
    import torch
    import torch.distributed as dist

    from ulorl_megatron.policy.head import ScoreHead

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    g = torch.Generator().manual_seed(0)
    dtype = getattr(torch, args.dtype)
    hidden = torch.randn(args.tokens, args.hidden, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(WORDS, args.hidden, generator=g).mul_(2 * args.hidden**-0.5).to(dtype).requires_grad_()
    labels = torch.randint(0, WORDS, (args.tokens,), generator=g)
    upstream = torch.randn(args.tokens, generator=g)
    if way.endswith("masked"):
        upstream[torch.rand(args.tokens, generator=g) < 0.3] = 0.0
    head = ScoreHead(TEMPERATURE, False, WORDS, args.chunk)

    def scores(tokens: int) -> Tuple[torch.Tensor, torch.Tensor]:
        if way.startswith("plain"):
            log_probs = torch.log_softmax((hidden[:tokens] @ weight.t()).float() / TEMPERATURE, -1)
            with torch.no_grad():
                entropies = -(log_probs.exp() * log_probs).sum(-1)
            return log_probs.gather(-1, labels[:tokens, None])[:, 0], entropies
        layer = SimpleNamespace(tp_group=dist.group.WORLD, weight=weight)
        context = SimpleNamespace(positions=torch.arange(tokens), labels=labels[:tokens])
        config = SimpleNamespace(sequence_parallel=False)
        return head(hidden[:, None], layer, None, config, context)[:2]

    torch.autograd.grad(scores(8)[0].sum(), (hidden, weight))  # what the libraries allocate once
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    began = time.process_time()
    log_probs, entropies = scores(args.tokens)
    gradients = torch.autograd.grad((log_probs * upstream).sum(), (hidden, weight))
    seconds = time.process_time() - began
    extra = resident("VmHWM") - before - sum(x.nbytes for x in (log_probs, entropies, *gradients))
    check = entropies.mean().item(), *(x.float().norm().item() for x in gradients)
    print(seconds, extra, *check)


def resident(key: str) -> int:
    """Bytes of a size in /proc/self/status."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status[key].split()[0]) * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--chunk", type=int, default=1024, help="policy.head_chunk_tokens")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--way", choices=WAYS, help="measure this alone, in this process")
    args = parser.parse_args()
    if args.way:
        run(args.way, args)
        return
    print(f"{args.tokens} tokens, hidden {args.hidden}, {args.dtype}, {WORDS} words, chunks of {args.chunk}")
    best = {}
    for _ in range(args.repeat):
        for way in WAYS:
            done = subprocess.run([sys.executable, *sys.argv, "--way", way], check=True, capture_output=True)
            figures = [float(word) for word in done.stdout.split()]
            best[way] = min(best.get(way, figures), figures)
    for way, (seconds, extra, *check) in best.items():
        plain_seconds, plain_extra, *expected = best[way.replace("head", "plain")]
        assert all(abs(a - b) <= 1e-2 * abs(b) for a, b in zip(check, expected, strict=True)), (check, expected)
        print(
            f"{way:<14}{seconds:8.2f} CPU s {extra / 1e9:8.3f} GB    "
            f"time {seconds / plain_seconds:.2f}, memory {extra / plain_extra:.4f} of the plain way"
        )


if __name__ == "__main__":
    main()
