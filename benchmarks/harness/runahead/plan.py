"""Plan of `runahead.py`: what each launch of ranks measures, and which of it is measured already."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from ..links import FREE
from ..noise import ELSEWHERE, LINK, QUIET

TENSOR_PARALLEL = ("tp", "tp_gloo")
METHODS = (
    "tsp", "tsp_causal", *TENSOR_PARALLEL, "pass_kv", "pass_q", "kvr_e", "kvr_s", "kvr_p", "one_rank", "auto",
)  # fmt: skip
CANDIDATES = {"single": "one_rank", "runahead": "kvr_s", "pass_kv": "pass_kv", "pass_q": "pass_q"}
"""Names of candidates as `auto` has them, and the method that each is."""
CHOSEN = {method: candidate for candidate, method in CANDIDATES.items()} | {"runahead": "runahead"}
NOISY = ("tsp", "tsp_causal", "kvr_e", "kvr_s", "pass_kv")  # Also measured beside a competing flow
NOISES = (QUIET, ELSEWHERE, LINK)


@dataclass(frozen=True)
class Group:
    """Cases that one launch of ranks measures."""

    ranks: int
    kv_heads: int
    rate: str  # Of the links
    contexts: tuple[int, ...]  # Ascending
    noise: bool = False  # Whether there is a competing flow to switch

    @property
    def name(self) -> str:
        return f"r{self.ranks}-kv{self.kv_heads}-{self.rate}"

    def methods(self, asked: Sequence[str], context: int, spacing: int) -> list[str]:
        """Methods asked for that there are here."""
        # DeepSpeed's shared-memory op is for one host.
        absent = set() if self.rate == FREE else {"tp"}
        if self.kv_heads % self.ranks:
            absent.update(TENSOR_PARALLEL)
        if context % spacing == 0 or context < spacing:
            absent.add("kvr_p")
        return [name for name in asked if name not in absent]

    def searched(self, asked: Sequence[str], spacing: int, context: int) -> list[int]:
        """The lengths that partitions are searched for: one measured, and the neighbours of one predicted."""
        names = self.methods(asked, context, spacing)
        predicted = [context // spacing * spacing, (context // spacing + 1) * spacing] if "kvr_p" in names else []
        return sorted({*predicted, *([context] if "kvr_s" in names else [])})

    @property
    def words(self) -> list[str]:
        """Options that ask for this group alone; they count where others stand before."""
        asked = {"sizes": self.ranks, "kv-heads": self.kv_heads, "rates": self.rate}
        return [word for name, value in asked.items() for word in (f"--{name}", str(value))]


def groups(arguments: argparse.Namespace) -> list[Group]:
    """All that is asked for, the free links first."""
    return [
        Group(size, kv_heads, rate, tuple(arguments.context), arguments.noise and rate != FREE)
        for rate in sorted(arguments.rates, key=lambda rate: rate != FREE)
        for kv_heads in sorted(arguments.kv_heads, reverse=True)
        for size in arguments.sizes
    ]
