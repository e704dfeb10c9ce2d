"""Which queries see which keys, as a short list of rectangles, decided from global slots alone.

Slots ascend, so the keys that query row ``i`` sees are one range ``[low[i], high[i])`` of the key rows, and both ends
never move back from one row to the next: the visible region is a staircase. It is cut into rectangles seen by every row
(no mask), squares with the same slots on both sides (the kernel's own causal mask) and, where neither fits, small
blocks with an explicit mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megakv.base.device import upload

Slots = npt.NDArray[np.int64]
AnySlots = TypeVar("AnySlots", npt.NDArray[Any], Tensor)
Kind = Literal["full", "causal", "masked"]

# Rows of a masked block, and its row x key pairs: what its explicit mask may cost in memory (16 MiB in float32).
MASKED_ROWS = 1024
MASKED_PAIRS = 4 << 20
# Below this many pairs one masked kernel call is cheaper than separate calls and merges for its unmasked part.
SMALL_PAIRS = 256 * 768
# Least rows of a window's tile; a quarter of the window above that (measured: 1.0 to 1.4 times as fast as all of it).
WINDOW_ROWS = 128
# A run of equally treated rows shorter than this is masked together with short neighbours ...
SHORT_RUN = 64
# ... unless that many keys lie between them, which every row of the masked block would compute and hide.
SHORT_STEP = 512


class Block(NamedTuple):
    """A rectangle of query rows ``[q0, q1)`` and key rows ``[k0, k1)``.

    ``full``: every pair is visible. ``causal``: square, row i sees keys 0..i of the block. ``masked``: needs the mask
    that `visible_pairs` gives for its slots; some of its rows may see nothing.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    kind: Kind


class _Run(NamedTuple):
    """Consecutive query rows ``[a, b)`` whose newest keys follow one pattern."""

    a: int
    b: int
    pattern: Literal["flat", "diagonal", "mixed"]


def visible_pairs(q_slots: AnySlots, k_slots: AnySlots, window: int | None = None) -> AnySlots:
    """The boolean mask ``[L, S]``, true where the query at ``q_slots[i]`` sees the key at ``k_slots[j]``.

    A key is visible if its slot is at most the query's and, with a window W, greater than the query's minus W.
    """
    visible = k_slots[None, :] <= q_slots[:, None]
    if window is not None:
        visible &= k_slots[None, :] > q_slots[:, None] - window
    return visible


@dataclass(frozen=True, eq=False)
class Visibility:
    """Which keys the rows of a block see, by the slots of both, which ascend: for kernels in one form or the other."""

    q_slots: Slots
    k_slots: Slots
    window: int | None

    def mask(self, device: torch.device) -> Tensor:
        """See `visible_pairs`."""
        return visible_pairs(upload(self.q_slots, device), upload(self.k_slots, device), self.window)

    def ranges(self) -> tuple[Slots, Slots]:
        """``[L]`` each: a row sees the keys from the first one on, to before the second one."""
        high = np.searchsorted(self.k_slots, self.q_slots, side="right")
        if self.window is None:
            return np.zeros_like(high), high
        return np.searchsorted(self.k_slots, self.q_slots - self.window, side="right"), high


def plan_blocks(q_slots: Slots, k_slots: Slots, window: int | None = None) -> list[Block]:
    """Cover exactly the visible pairs of one sequence's queries and keys, given by strictly ascending global slots.

    Blocks are disjoint. Every visible pair lies in exactly one; hidden pairs lie only above the diagonal of causal
    blocks and under the mask of masked ones. Blocks of more query rows come first where there is a choice.
    """
    if not len(q_slots) or not len(k_slots) or k_slots[0] > q_slots[-1]:
        return []
    windowed = window is not None and k_slots[0] <= q_slots[-1] - window
    if k_slots[-1] <= q_slots[0] and not windowed:
        return [Block(0, len(q_slots), 0, len(k_slots), "full")]
    high = np.searchsorted(k_slots, q_slots, side="right")
    if windowed:
        assert window is not None
        low = np.searchsorted(k_slots, q_slots - window, side="right")
    else:
        low = np.zeros_like(high)
    blocks: list[Block] = []
    runs = [run for run in _runs(q_slots, k_slots, high) if high[run.b - 1] > low[run.a]]
    for run in _melt_short_runs(runs, high):
        for a, b in _tiles(run, low, high, window if windowed else None):
            blocks.extend(_tile_blocks(a, b, run.pattern, low, high))
    return blocks


def _runs(q_slots: Slots, k_slots: Slots, high: Slots) -> list[_Run]:
    """Cut the rows into runs that all see the same newest key (flat) or each its own token's (diagonal)."""
    own = (high > 0) & (k_slots[high - 1] == q_slots)
    step = np.diff(high)
    # Row i goes on with the run of row i - 1 as a diagonal if both see their own key and it is the next one.
    diagonal = own[1:] & own[:-1] & (step == 1)
    flat = step == 0
    # How each row goes on with the one before; where that changes, the row between the two kinds ends the earlier run.
    link = np.concatenate([[0], np.where(diagonal, 1, np.where(flat, 2, 0))])
    before = np.concatenate([[0], link[:-1]])
    starts = np.flatnonzero((link == 0) | (before != 0) & (before != link))
    return [
        _Run(a, b, "diagonal" if b - a > 1 and link[a + 1] == 1 else "flat")
        for a, b in pairwise([*starts.tolist(), len(high)])
    ]


def _melt_short_runs(runs: list[_Run], high: Slots) -> list[_Run]:
    """Join neighbouring short runs into one that is masked, where a kernel call for each would cost more."""
    melted: list[_Run] = []
    for run in runs:
        last = melted[-1] if melted and run.b - run.a < SHORT_RUN else None
        small = last is not None and (last.pattern == "mixed" or last.b - last.a < SHORT_RUN)
        if last is not None and small and high[run.a] - high[last.b - 1] <= SHORT_STEP:
            melted[-1] = _Run(last.a, run.b, "mixed")
        else:
            melted.append(run)
    return melted


def _tiles(run: _Run, low: Slots, high: Slots, window: int | None) -> Iterator[tuple[int, int]]:
    """Cut a run so that a window's work stays linear in the rows and no explicit mask grows large."""
    rows = run.b - run.a
    if run.pattern == "mixed":
        rows = min(rows, MASKED_ROWS)
    if window is not None:
        rows = min(rows, max(WINDOW_ROWS, min(window // 4, MASKED_ROWS)))
    a = run.a
    while a < run.b:
        b = min(a + rows, run.b)
        while (b - a) * _masked_keys(a, b, run.pattern, low, high) > MASKED_PAIRS:
            b = a + (b - a) // 2
        yield a, b
        a = b


def _masked_keys(a: int, b: int, pattern: str, low: Slots, high: Slots) -> int:
    left = int(low[b - 1] - low[a])
    return left + (int(high[b - 1] - high[a]) if pattern == "mixed" else 0)


def _tile_blocks(a: int, b: int, pattern: str, low: Slots, high: Slots) -> Iterator[Block]:
    """Blocks of rows ``[a, b)``: what all rows see, the staircase left of it (window) and right of it (causality)."""
    k0, k1 = int(low[a]), int(high[b - 1])
    # What every row sees; a diagonal's own first key goes with its causal square.
    middle0, middle1 = int(low[b - 1]), int(high[a]) - (pattern == "diagonal")
    if k0 >= k1:
        return
    small = (b - a) * (k1 - k0) <= SMALL_PAIRS
    clean = middle0 == k0 and pattern != "mixed"
    if middle0 > middle1 or (small and not clean):
        yield Block(a, b, k0, k1, "masked")
        return
    if middle0 < middle1:
        yield Block(a, b, middle0, middle1, "full")
    if k0 < middle0:
        yield Block(a, b, k0, middle0, "masked")
    if middle1 < k1:
        yield Block(a, b, middle1, k1, "causal" if pattern == "diagonal" else "masked")


def sees_all(slot: int, slots: Slots, first: int, count: int, window: int | None) -> bool:
    """Whether a row at a slot sees all of so many keys, from the first on, of a sequence with these slots."""
    return bool(slots[first + count - 1] <= slot and (window is None or slots[first] > slot - window))
