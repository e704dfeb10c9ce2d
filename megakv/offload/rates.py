"""A few rates of an engine's work: as the machine's profile has them, fitted to what the last steps took."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from megakv.costmodel.hardware import HostProfile
from megakv.offload.prices import LayerPrices
from megakv.offload.profile import Profiler, recompute_operations
from megakv.offload.record import StepRecord

if TYPE_CHECKING:
    from megakv.injection.recomputation import Recomputation
    from megakv.offload.host_rank import HostRank
    from megakv.offload.store import TieredStore

STEPS = 12
"""Latest steps that rates are fitted to."""
DOUBT = {"launch_s": 4.0, "host_sequence_s": 4.0, "host_call_s": 4.0, "transfer_s": 4.0}
"""How far the profile's rates may be off beside other work, in parts of them, where that is not 1: memory is shared
with transfers, and calls wait for Python, which one thread has at a time."""
BELIEF = 0.1
"""Weight of the profile's rates beside a step's."""
MANY = 1 / 2
"""Part of the cached tokens: attention to fewer shows its calls rather than its speed."""
Work = Mapping[str, float]
"""How much of what each rate is a price of: bytes, tokens, calls."""


def nonnegative_least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Factors of a few columns, none of them below 0, whose sums come nearest to the values."""
    matrix, wanted = np.array(rows), np.array(values)
    columns = range(matrix.shape[1])
    best, nearest = np.zeros(len(columns)), float(wanted @ wanted)
    for used in (list(some) for count in reversed(columns) for some in combinations(columns, count + 1)):
        found = np.linalg.lstsq(matrix[:, used], wanted, rcond=None)[0]
        off = float(((matrix[:, used] @ found - wanted) ** 2).sum())
        if (found >= 0).all() and off < nearest:
            best, nearest = np.zeros(len(columns)), off
            best[used] = found
            if len(used) == len(columns):
                break
    return best.tolist()


def fitted(steps: Sequence[tuple[Work, float]], rates: Mapping[str, float]) -> dict[str, float]:
    """Rates by which the work of some steps comes nearest to the seconds that it took, and to what they were.

    Errors are relative to what a step took, so that one that was disturbed says little. One kind of step cannot tell
    rates apart: what it took beyond what was expected goes to each by how far that may be off.
    """
    names = sorted({name for work, _ in steps for name, count in work.items() if count and rates.get(name, 1.0)})
    if not names:
        return {}
    rows = [[work.get(name, 0.0) * rates.get(name, 1.0) / seconds for name in names] for work, seconds in steps]
    beliefs = [BELIEF / DOUBT.get(name, 1.0) if name in rates else 0.0 for name in names]
    rows += [[belief * (one == other) for other in names] for one, belief in zip(names, beliefs, strict=True)]
    factors = nonnegative_least_squares(rows, [1.0] * len(steps) + beliefs)
    return {name: factor * rates.get(name, 1.0) for name, factor in zip(names, factors, strict=True)}


class Rates:
    """Rates of one engine's work, in seconds for each unit; those that nothing is known of are missing."""

    def __init__(self, profiler: Profiler):
        self.profile: HostProfile | None = None
        """As it was measured, or read; None before the first call of `prices`."""
        self.measured: dict[str, float] = {}
        """By the profile alone."""
        self.row_bytes = 0.0
        self.input_bytes = 0
        self._profiler = profiler
        self._measured_for = 0, False
        self._steps: defaultdict[str, deque[tuple[Work, float]]] = defaultdict(lambda: deque(maxlen=STEPS))
        self._fitted: dict[str, float] = {}

    def __getitem__(self, name: str) -> float:
        return self._fitted.get(name, self.measured.get(name, 0.0))

    def prices(
        self,
        store: TieredStore,
        recomputation: Recomputation | None,
        host: HostRank | None,
        *,
        groups: int = 1,
        row_bytes: Callable[[], float] | None = None,
    ) -> LayerPrices:
        """Prices of a layer that holds cached tokens, for one of `groups` groups of sequences.

        In the mean of all layers a token has `row_bytes`, the store's if None. The first call measures, or reads the
        profile; a ValueError says that it is of another machine.
        """
        needed = max(store.input_bytes, self.input_bytes), host is not None or self._measured_for[1]
        if self.profile is None or needed != self._measured_for:
            self.profile, self._measured_for = self._profiler.profile(store, recomputation, host), needed
            self.row_bytes = store.row_bytes if row_bytes is None else row_bytes()
            self.input_bytes = store.input_bytes
            self.measured = self._rates_of(self.profile, recompute_operations(store))
        return self.layer_prices(self._fitted, len(store.lengths()) / groups)

    def layer_prices(self, fitted: Mapping[str, float], sequences: float) -> LayerPrices:
        """Prices by fitted rates, and the profile's where there are none, where a group has so many sequences."""
        rates = defaultdict(float, {**self.measured, **fitted})
        return LayerPrices(
            kv_s=self.row_bytes * rates["byte_s"],
            activation_s=self.input_bytes * rates["byte_s"],
            recompute_s=rates["recompute_s"],
            transfer_s=rates["transfer_s"],
            launch_s=rates["launch_s"],
            device_s=rates["device_s"],
            attend_s=rates["attend_s"],
            host_attend_s=rates["host_attend_s"],
            host_fixed_s=rates["host_call_s"] + rates["host_sequence_s"] * sequences,
            disk_kv_s=self.row_bytes * rates["disk_byte_s"],
            disk_activation_s=self.input_bytes * rates["disk_byte_s"],
        )

    def learn(self, record: StepRecord, layers: int) -> None:
        """Take in what a step of decoding took."""
        # A rank that has held none of the cached tokens so far has measured nothing.
        if not record.usual or record.profiled or self.profile is None:
            return
        splits, split, sent = record.plan.splits, record.split, record.traffic
        hosted, kept = split.on_host + record.kept_on_host, record.kept
        calls = layers * sum(record.plan.kept_on_host or each.on_host > 0 for each in splits)
        transfers = layers * sum(each.chunks + (each.streamed > 0 or kept > 0) for each in splits)
        attended = split.tokens + kept - split.on_host
        busy_s = record.elapsed_s - record.waited_s - record.recompute_s - record.peers_s
        took: dict[str, tuple[Work, float]] = {
            "link": (
                {
                    "byte_s": sent.timed_bytes - sent.timed_file_bytes,
                    "disk_byte_s": sent.timed_file_bytes,
                    "transfer_s": transfers,
                },
                sent.busy_s,
            ),
            "recompute": (
                {
                    "recompute_s": layers * split.recomputed,
                    "launch_s": layers * sum(each.chunks for each in splits),
                },
                record.recompute_s,
            ),
            "host": (
                {"host_attend_s": layers * hosted, "host_call_s": calls, "host_sequence_s": calls * record.sequences},
                record.host_s,
            ),
            "outside": ({"outside_s": 1.0}, record.gap_s),
        }
        # Other ranks are waited for in the midst of attention.
        if attended >= MANY * split.tokens and not record.peers_s:
            took["attend"] = {"attend_s": layers * attended}, record.attend_s
        self._take_in(took)
        # All that is left is the layers' other work.
        self._take_in({"device": ({"device_s": layers}, busy_s - layers * attended * self["attend_s"])})

    def _take_in(self, took: Mapping[str, tuple[Work, float]]) -> None:
        for kind, (work, seconds) in took.items():
            if seconds > 0 and any(work.values()):
                self._steps[kind].append((work, seconds))
                self._fitted |= fitted(self._steps[kind], self.measured)

    def _rates_of(self, profile: HostProfile, operations: int) -> dict[str, float]:
        assert profile.host_link is not None
        # Ranks of a host divide the bandwidth of its disk, and that of its memory where they attend.
        link, sharers = profile.host_link.bandwidth, self._profiler.sharers
        disk, flops, attention = profile.disk_bandwidth, profile.recompute_flops, profile.host_attention_bandwidth
        return {
            "byte_s": 1 / link,
            "disk_byte_s": max(1 / link, sharers / disk) if disk else 1 / link,
            "transfer_s": profile.host_link.latency,
            "recompute_s": operations / flops if flops else 0.0,
            "launch_s": profile.recompute_call_s,
            "host_attend_s": sharers * self.row_bytes / attention if attention else 0.0,
            "host_sequence_s": profile.host_sequence_s,
            "host_call_s": profile.host_call_s,
        }
