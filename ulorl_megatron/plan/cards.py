"""What a rank runs on: memory, rates and links of the cards `ulorl plan` knows.

Memory is what torch sees of the card, which is less than its name says. Rates and links are the makers' figures; what
a training step reaches of them is an assumption, and printed as one. The experts' part was chosen after the nearest
published run, Qwen3-30B-A3B on 16 H100 in Megatron-Bridge's performance summary 25.11 (4096 tokens, pipeline 2, 24
model chunks, expert 8, FP8: 5275 tokens/s a card): with all layers recomputed, without which it would not fit, the
formulas give 5748.
"""

import os
from dataclasses import dataclass
from typing import Dict, Optional

GIB = 2**30
GPUS_PER_NODE = 8


@dataclass(frozen=True)
class Rates:
    """peak: dense bfloat16 FLOP/s. nvlink, network, host: bytes/s one way of one card, within its node, out of it, and
    to its host's memory."""

    peak: float
    nvlink: float
    network: float
    host: float


@dataclass(frozen=True)
class Card:
    """memory: bytes of one rank. rates: None where nothing is promised (CPU)."""

    name: str
    memory: int
    rates: Optional[Rates]

    @property
    def cuda(self) -> bool:
        return self.rates is not None


# What the dense layers' matrix products, the experts' (small, and one an expert) and attention reach of the peak, and
# transfers of their link.
LINEAR, EXPERT, ATTENTION, LINK = 0.55, 0.15, 0.40, 0.75

# NVLink 4, a 400 Gbit/s port a card, PCIe 5.
_HOPPER = Rates(peak=989e12, nvlink=450e9, network=50e9, host=63e9)
# NVLink 3, a 200 Gbit/s port a card, PCIe 4.
_AMPERE = Rates(peak=312e12, nvlink=300e9, network=25e9, host=31e9)
_CARDS: Dict[str, Card] = {
    "h100-80": Card("H100, 80 GB", int(79.1 * GIB), _HOPPER),
    "h200-141": Card("H200, 141 GB", int(139.8 * GIB), _HOPPER),
    "a100-80": Card("A100, 80 GB", int(79.2 * GIB), _AMPERE),
}
NAMES = (*_CARDS, "cpu")


def card(name: str, ranks: int) -> Card:
    """The card called `name`; "cpu" is an equal share of this machine's memory among `ranks`."""
    if name == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Card("CPU, this machine's memory shared", memory // ranks, None)
    return _CARDS[name]
