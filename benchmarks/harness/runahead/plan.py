"""Plan of `runahead.py`: what each launch of ranks measures, and which of it is measured already."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..links import FREE
from ..noise import ELSEWHERE, LINK, QUIET

TENSOR_PARALLEL = ("tp", "tp_gloo")
APART = ("single", "single_masked")  # Measured in rounds of their own: bounds follow from them, no claim
METHODS = (
    "tsp", "tsp_causal", *TENSOR_PARALLEL, "pass_kv", "pass_q", "kvr_e", "kvr_s", "kvr_p", "kvr_silent", "one_rank",
    "auto", *APART,
)  # fmt: skip
NOISY = ("tsp", "tsp_causal", "kvr_e", "kvr_s", "pass_kv")  # Also measured beside a competing flow
NOISES = (QUIET, ELSEWHERE, LINK)
SEARCH = "search-"  # Beginning of the names of searches that are kept


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
        """Beginning of its files' names."""
        return f"r{self.ranks}-kv{self.kv_heads}-{self.rate}"

    def case(self, context: int) -> str:
        return f"{self.name}-{context}"

    def methods(self, asked: Sequence[str], context: int, spacing: int) -> list[str]:
        """Methods asked for that there are here."""
        # DeepSpeed's shared-memory op is for one host.
        absent = set() if self.rate == FREE else {"tp"}
        if self.kv_heads % self.ranks:
            absent.update(TENSOR_PARALLEL)
        if context % spacing == 0 or context < spacing:
            absent.add("kvr_p")
        return [name for name in asked if name not in absent]

    def searched(self, asked: Sequence[str], spacing: int, contexts: Sequence[int] | None = None) -> list[int]:
        """The lengths that partitions are searched for: those measured, and the neighbours of those predicted."""
        lengths: set[int] = set()
        for context in self.contexts if contexts is None else contexts:
            names = self.methods(asked, context, spacing)
            if "kvr_s" in names or "kvr_silent" in names:
                lengths.add(context)
            if "kvr_p" in names:
                lengths.update((context // spacing * spacing, (context // spacing + 1) * spacing))
        return sorted(lengths)

    def words(self, contexts: Sequence[int]) -> list[str]:
        """Options that ask for this group alone, with some of its contexts; they count where others stand before."""
        asked = {"sizes": self.ranks, "kv-heads": self.kv_heads, "rates": self.rate}
        asked["context"] = ",".join(map(str, contexts))
        return [word for name, value in asked.items() for word in (f"--{name}", str(value))]


def profile_path(group: Group, folder: Path) -> Path:
    """The file of a group's hardware profile, beside its cases."""
    return folder / "profiles" / f"{group.name}.json"


def groups(arguments: argparse.Namespace) -> list[Group]:
    """All that is asked for, the free links first."""
    return [
        Group(size, kv_heads, rate, tuple(arguments.context), arguments.noise and rate != FREE)
        for rate in sorted(arguments.rates, key=lambda rate: rate != FREE)
        for kv_heads in sorted(arguments.kv_heads, reverse=True)
        for size in arguments.sizes
    ]


def identity(arguments: argparse.Namespace) -> dict[str, Any]:
    """Settings that must be the same for cases to be reported together."""
    names = ("family", "layers", "hidden", "heads", "intermediate", "vocab", "dtype", "threads")
    return {name: getattr(arguments, name) for name in names}


def is_done(part: Mapping[str, Any] | None, methods: Sequence[str], noise: bool, repeats: int) -> bool:
    """Whether a case that was kept answers what is asked now."""
    if part is None:
        return False
    wanted = {(name, QUIET) for name in methods} | {(name, LINK) for name in methods if noise and name in NOISY}
    return wanted <= {(row["method"], row["noise"]) for row in part["rows"]} and part["repeats"] >= repeats
