"""What `ulorl plan` prints. GiB are 2**30 bytes."""

import io
from dataclasses import asdict
from typing import Any, Dict, List, Optional, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from checkpoint_tools.report import describe
from ulorl_megatron.config.schema import TransformerImpl
from ulorl_megatron.plan import cards
from ulorl_megatron.plan.cards import GIB, Card
from ulorl_megatron.plan.layout import Layout
from ulorl_megatron.plan.memory import FRAGMENTATION, RankMemory, runtime
from ulorl_megatron.plan.search import Candidate, best
from ulorl_megatron.plan.throughput import Throughput

_WIDTH = 120
_SHOWN_STAGES = 8


def plan_text(
    layout: Layout, card: Card, stages: Sequence[RankMemory], speed: Optional[Throughput], source: str
) -> str:
    """The whole report on one layout."""
    fullest = max(stages, key=lambda rank: rank.total)
    console = _console()
    _say_header(console, layout, card, source)
    console.print(_memory_table(stages, card))
    if speed:
        console.print(_time_table(speed))
        _say_throughput(console, layout, speed)
    _say_assumptions(console, layout, speed is not None)
    console.print(verdict(fullest, card))
    return console.file.getvalue()


def verdict(fullest: RankMemory, card: Card) -> str:
    """One line: whether it fits, by how much, and what is largest where it does not."""
    need, have = f"{fullest.total / GIB:.1f} GiB", f"{card.memory / GIB:.1f} GiB"
    if fullest.total <= card.memory:
        return f"fits: the fullest rank needs {need} of {have}"
    name, size = max(_rows(fullest).items(), key=lambda row: row[1])
    return (
        f"does not fit: the fullest rank needs {need} of {have}; most is {name}, {size / GIB:.1f} GiB. "
        "--search looks for a layout that does"
    )


def search_text(found: List[Candidate], layout: Layout, card: Card, source: str, shown: int) -> str:
    """The best layouts, and the settings that make the first."""
    console = _console()
    arch, world = layout.arch, layout.world
    console.print(f"model   {describe(arch)}")
    console.print(f"        from {source}")
    console.print(f"ranks   {world} x {card.name}; longest sample {layout.sequence:,} tokens")
    if not found:
        console.print(
            f"\ndoes not fit: no layout of {world} ranks holds the longest sample. Take more ranks, a shorter "
            "rollout.global_max_length, or a smaller policy.head_chunk_tokens"
        )
        return console.file.getvalue()
    console.print(_search_table(found[:shown]))
    chosen = best(found)
    console.print(
        f"fits: {len(found)} layouts. Of those within 5 % of the fastest (the expectation is no finer) the one that "
        f"needs the least memory ({chosen.total / GIB:.1f} GiB"
        + (f", {chosen.per_second:,.0f} tokens/s" if chosen.speed else "")
        + "):"
    )
    console.print("  " + " ".join(chosen.overrides))
    return console.file.getvalue()


def plan_data(layout: Layout, card: Card, stages: Sequence[RankMemory], speed: Optional[Throughput]) -> Dict[str, Any]:
    """The same for programs; bytes and seconds."""
    fullest = max(stages, key=lambda rank: rank.total)
    return {
        "fits": fullest.total <= card.memory,
        "card": card.name,
        "memory": card.memory,
        "ranks": layout.world,
        "layout": asdict(layout.sizes),
        "longest_sample": layout.sequence,
        "tokens_per_rank": layout.tokens,
        "stages": [{**asdict(rank), "total": rank.total} for rank in stages],
        "throughput": speed and {**asdict(speed), "seconds": speed.seconds, "tokens_per_second": speed.per_second},
    }


def search_data(found: List[Candidate], card: Card) -> Dict[str, Any]:
    return {
        "fits": bool(found),
        "card": card.name,
        "layouts": [
            {"overrides": c.overrides, "total": c.total, "tokens_per_second": c.speed and c.speed.per_second}
            for c in found
        ],
    }


def _console() -> Console:
    return Console(file=io.StringIO(), width=_WIDTH, soft_wrap=True, highlight=False)


def _say_header(console: Console, layout: Layout, card: Card, source: str) -> None:
    sizes = {name: size for name, size in vars(layout.sizes).items() if size > 1}
    console.print(f"model   {describe(layout.arch)}, {layout.dtype.value}")
    console.print(f"        from {source}")
    parts = ", ".join(f"{name} {size}" for name, size in sizes.items()) or "no model parallelism"
    console.print(
        f"layout  {layout.world} ranks: {parts}, data {layout.data_parallel}; layers by {layout.impl.value}, "
        f"recompute {layout.recompute.value}"
    )
    console.print(f"card    {card.name}: {card.memory / GIB:.1f} GiB a rank")
    console.print(
        f"batch   longest sample {layout.sequence:,} tokens; fullest micro-batch {layout.tokens:,} tokens a rank"
    )


def _rows(rank: RankMemory) -> Dict[str, int]:
    """Bytes of a rank, in the order of the table; the sum is the total but for what is in brackets there."""
    return {
        "parameters": rank.parameters,
        "gradients": rank.gradients,
        "optimizer": rank.optimizer,
        **{f"activations: {part}": size for part, size in rank.kept.items() if size},
        "layer in progress": rank.layer,
        "log-prob head": rank.head,
        "fragmentation": rank.fragmentation,
        "runtime": rank.runtime,
    }


def _memory_table(stages: Sequence[RankMemory], card: Card) -> Table:
    shown = list(stages)
    if len(shown) > _SHOWN_STAGES:
        fullest = max(stages, key=lambda rank: rank.total).stage
        shown = [stages[s] for s in sorted({0, 1, fullest, len(stages) - 1})]
    table = Table(box=SIMPLE_HEAD, title="memory of a rank, GiB", title_justify="left")
    table.add_column("")
    for rank in shown:
        table.add_column("every rank" if len(stages) == 1 else f"stage {rank.stage}", justify="right")
    columns = [_rows(rank) for rank in shown]
    for name in dict.fromkeys(name for column in columns for name in column):
        table.add_row(name, *(_cell(name, column, rank) for column, rank in zip(columns, shown, strict=True)))
    table.add_section()
    table.add_row("total", *(f"{rank.total / GIB:.2f}" for rank in shown))
    table.add_row("of the card", *(f"{rank.total / card.memory:.0%}" for rank in shown))
    return table


def _cell(name: str, column: Dict[str, int], rank: RankMemory) -> str:
    size = column.get(name, 0)
    if not size:
        return "-"
    text = f"{size / GIB:.2f}"
    needed_then = {"layer in progress": rank.layer >= rank.head, "log-prob head": rank.head > rank.layer}
    return text if needed_then.get(name, True) else f"({text})"


def _time_table(speed: Throughput) -> Table:
    table = Table(box=SIMPLE_HEAD, title="expected time of an optimizer step", title_justify="left")
    for name in ("", "seconds", "share", "bound by"):
        table.add_column(name, justify="right" if name in ("seconds", "share") else "left")
    for term in speed.terms:
        table.add_row(term.name, f"{term.seconds:.2f}", f"{term.seconds / speed.seconds:.0%}", term.bound)
    table.add_section()
    table.add_row("step", f"{speed.seconds:.2f}", "100%", "")
    return table


def _say_throughput(console: Console, layout: Layout, speed: Throughput) -> None:
    first, share = next(iter(speed.shares.items()))
    console.print(
        f"expected {speed.per_second:,.0f} tokens/s trained ({speed.per_second / layout.world:,.0f} a card), "
        f"{speed.utilisation:.0%} of the cards' peak; {first} binds ({share:.0%} of the step)"
    )
    console.print(
        f"tokens/s = {layout.samples:g} samples x {layout.sequence:,} tokens / {speed.seconds:.1f} s; "
        f"seconds = {layout.micro_batches} micro-batches x (FLOP / rate + bytes / link) + bubble + update;\n"
        f"FLOP a token = 6 x weights it meets + 12 x query elements x {layout.sequence // 2:,} keys a layer "
        f"= {speed.flops / 1e9:,.1f} GFLOP, and what is computed again\n"
    )


def _say_assumptions(console: Console, layout: Layout, timed: bool) -> None:
    console.print("assumed:")
    if layout.sizes.expert > 1:
        console.print(f"- the fullest expert-parallel rank gets {layout.imbalance:g} x the mean (--imbalance)")
    console.print(
        f"- {runtime(layout) / GIB:.1f} GiB a rank for what runs besides, {FRAGMENTATION:.0%} of the activations "
        "lost to fragmentation"
        if layout.cuda
        else f"- {runtime(layout) / GIB:.1f} GiB a rank for Python and its libraries"
    )
    if layout.cuda and layout.impl is TransformerImpl.local and layout.sizes.context > 1:
        console.print(
            "- torch finds a fused kernel for grouped queries with a mask (local layers under context parallelism)"
        )
    console.print("- of layer in progress and log-prob head only the larger counts: they are needed at different times")
    if timed:
        console.print(
            f"- matrix products reach {cards.LINEAR:.0%} of the peak, the experts' {cards.EXPERT:.0%}, attention "
            f"{cards.ATTENTION:.0%}; collectives {cards.LINK:.0%} of their link, not hidden behind computation"
        )
        console.print(f"- nodes of {cards.GPUS_PER_NODE} cards; the servers decode elsewhere and are not counted")
        console.print("- every sample is of the longest length, and as many finish in a step as begin")


def _search_table(found: List[Candidate]) -> Table:
    table = Table(
        box=SIMPLE_HEAD, title="layouts that fit (tokens: of the longest micro-batch on a rank)", title_justify="left"
    )
    names = ("tensor", "pipeline", "virtual", "context", "expert", "exp.tensor", "data", "recompute", "tokens")
    for name in (*names, "GiB", "tokens/s", "binds"):
        table.add_column(name, justify="left" if name in ("recompute", "binds") else "right")
    for c in found:
        speed = c.speed
        table.add_row(
            *(str(size) for size in vars(c.layout.sizes).values()),
            str(c.layout.data_parallel),
            c.layout.recompute.value,
            f"{c.layout.tokens:,}",
            f"{c.total / GIB:.1f}",
            f"{speed.per_second:,.0f}" if speed else "-",
            next(iter(speed.shares)) if speed else "memory",
        )
    return table
