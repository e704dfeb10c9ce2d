"""Predicted seconds of one attention layer by method, from a hardware profile.

What a rank computes in each step of a ring follows from the balanced layout (context parallelism, Section 3.5.1): of
2N chunks, rank i has chunks i and 2N-1-i. Of its own shard it sees a causal square; of an earlier rank's the first
chunk, with all its rows; of a later rank's both chunks, with its second half of rows: the same number of pairs, in
differently shaped kernel calls. Cached tokens are seen by every row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, NamedTuple

from megakv.attention.visibility import SHORT_RUN
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.kernels import Kernels
from megakv.costmodel.shape import AttentionShape

Shard = Literal["own", "earlier", "later", "hidden"]
RINGS = ("pass_kv", "pass_q")
"""Methods whose messages go round, a shard at a time."""
OUTPUT_BYTES = 4
DECODING = "pass_q_decoding"
"""What `step_overhead_s` of a profile calls pass-Q of fewer than 2N tokens a sequence."""


@dataclass
class Prediction:
    """Seconds of one layer's attention, by what they go to."""

    # ``attention`` (kernels), ``exposed`` (ring exchange that attention does not hide), ``collective`` (All2All or
    # all-gather), ``straggle`` (waiting in it for the last rank), ``merge``, ``copy`` (packing messages), ``overhead``.
    terms: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return sum(self.terms.values())


class _Step(NamedTuple):
    """One rank's queries against one shard: kernels, rows that see anything, rows merged or written on the way."""

    attention_s: float = 0.0
    seen_rows: float = 0.0
    merged_rows: float = 0.0
    pieces_rows: float = 0.0


@dataclass(frozen=True)
class RankSteps:
    """What one rank does in one layer, in seconds."""

    steps: tuple[tuple[float, float, float], ...]  # Attention, merging and copying per step; its own shard comes first.
    pack_s: float = 0.0  # Packing what is sent, before the first step.
    overhead_s: float = 0.0  # At the start of every step.
    transfer_s: float = 0.0  # Exchange of the shards of one step, where they travel one by one.
    gather_s: float = 0.0  # All-gather before the first step, where they travel together.
    # After the last step, where partial outputs return: packing, waiting for the last rank, the collective, merging.
    unpack_s: float = 0.0
    straggle_s: float = 0.0
    return_s: float = 0.0
    combine_s: float = 0.0


class LayerTimes:
    """Predictions for one attention layer of one pass, of the rank with the most heads."""

    def __init__(self, profile: HardwareProfile, shape: AttentionShape, workload: Workload):
        self.profile = profile
        self.workload = workload
        self.size = workload.size
        self.shape = shape.of_pass(workload.new, workload.cached, workload.size)
        self._kernels = Kernels(profile, self.shape)

    def predict(self, method: str) -> Prediction:
        """Seconds of a method; a pass of fewer than 2N tokens a sequence goes the way of decoding."""
        if self.size == 1:
            return Prediction({"attention": self._total(self._alone).attention_s})
        if method == "replicated":
            return self._added_up(self._replicated())
        if self._short:
            return self._added_up(self._decoding())
        # After its own, the first rank meets only later ranks' shards and the last only earlier ones': one is slowest.
        ways = (self._added_up(self.steps(method, rank)) for rank in (self.size - 1, 0))
        return max(ways, key=lambda prediction: prediction.seconds)

    def predict_last(self, method: str) -> Prediction:
        """Seconds of a last layer that one token of each sequence is asked of: such queries travel, as in decoding."""
        work, size = self.workload, self.size
        asked = tuple(min(1, new) for new in work.new)
        rest = tuple(t + p - one for t, p, one in zip(work.new, work.cached, asked, strict=True))
        if size == 1 or method in RINGS:
            return LayerTimes(self.profile, self.shape, Workload(asked, rest, size)).predict("pass_q")
        message = self.shape.kv_row_bytes * self._kept
        return Prediction(
            {
                "copy": self.profile.copy_bytes.at(message),
                "collective": self.profile.all_gather.at(message * (size - 1)),
                "attention": sum(self._kernels.block(1, new + cached) for new, cached in self._sequences()),
            }
        )

    def steps(self, method: str, rank: int) -> RankSteps:
        """A context-parallel rank's way through one layer of a prompt, by any prefill method but ``runahead``.

        Raises ValueError for a prompt of fewer than 2N tokens, which is served like decoding.
        """
        if self.size == 1:
            return RankSteps(((self.predict(method).seconds, 0.0, 0.0),))
        if self._short:
            raise ValueError(
                f"a prompt of {max(self.workload.new)} tokens on {self.size} context-parallel ranks is served like "
                f"decoding: allowed here: {2 * self.size} tokens or more"
            )
        queries = method == "pass_q"
        message = self.shape.query_row_bytes * self._computed if queries else self.shape.kv_row_bytes * self._kept
        kinds = [self._shard(method, rank, step) for step in range(self.size)]
        timed = {kind: self._timed(self._step(method, kind)) for kind in dict.fromkeys(kinds)}
        way = RankSteps(
            tuple(timed[kind] for kind in kinds),
            pack_s=self.profile.copy_bytes.at(message),
            overhead_s=self.profile.step_overhead_s.get(method, 0.0),
            transfer_s=self.profile.exchange.at(message) if method in RINGS else 0.0,
            gather_s=0.0 if method in RINGS else self.profile.all_gather.at(message * (self.size - 1)),
        )
        return self._returning(way, self.workload.total_new - self._computed) if queries else way

    @property
    def _short(self) -> bool:
        return max(self.workload.new) < 2 * self.size

    def _decoding(self) -> RankSteps:
        message = self.shape.query_row_bytes * self._computed
        total = 0.0
        for new, cached in self._sequences():
            rows = math.ceil(new / self.size)
            total += new / rows * self._kernels.block(rows, (new + cached) / self.size)
        known = self.profile.step_overhead_s
        way = RankSteps(
            # At every step other sequences are at other ranks: together a rank attends to each of them once.
            ((total / self.size, 0.0, 0.0),) * self.size,
            pack_s=self.profile.copy_bytes.at(message),
            overhead_s=known.get(DECODING, known.get("pass_q", 0.0)),
            transfer_s=self.profile.exchange.at(message),
        )
        # The rank with the fewest queries of its own sends most, and all wait for it.
        return self._returning(way, self.workload.total_new - self.workload.total_new // self.size)

    def _replicated(self) -> RankSteps:
        rows = self.workload.total_new
        attention = sum(self._kernels.block(new, (new + cached) / self.size) for new, cached in self._sequences())
        partial = rows * self.shape.partial_row_bytes
        return RankSteps(
            ((attention, 0.0, 0.0),),
            pack_s=self.profile.copy_bytes.at(partial),
            overhead_s=self.profile.step_overhead_s.get("replicated", 0.0),
            straggle_s=self.profile.straggle * attention,
            return_s=self.profile.all_gather.at(partial * (self.size - 1)),
            combine_s=self._combined(rows),
        )

    def _returning(self, way: RankSteps, foreign_rows: float) -> RankSteps:
        """With the return of partial outputs to the ranks that asked."""
        # Every part is joined with its log-sum-exp, then all are joined to one buffer.
        fresh, part = self.profile.copy_fresh, self._computed * self.shape.partial_row_bytes
        return replace(
            way,
            unpack_s=self.size * fresh.at(part) + fresh.at(self.size * part),
            # A ring leaves its ranks a step of slack; in a collective behind attention all wait for the last one.
            straggle_s=self.profile.straggle * sum(attention for attention, *_ in way.steps),
            return_s=self.profile.all_to_all.at(foreign_rows * self.shape.partial_row_bytes),
            combine_s=self._combined(self._computed),
        )

    def _added_up(self, way: RankSteps) -> Prediction:
        """All of a rank's terms, each exchange beside the step that is computed meanwhile."""
        returns = way.return_s > 0
        terms = {"copy": way.pack_s, "attention": 0.0, "merge": 0.0, "exposed": 0.0}
        for index, (attention, merge, copy) in enumerate(way.steps):
            terms["attention"] += attention
            terms["merge"] += merge
            terms["copy"] += copy
            if index + 1 < len(way.steps):
                busy = attention + merge + copy
                terms["exposed"] += self.profile.overlapped(busy, way.transfer_s) - busy
        terms["copy"] += way.unpack_s
        terms["merge"] += way.combine_s
        terms["overhead"] = self.size * way.overhead_s
        if returns:
            terms["straggle"] = way.straggle_s
        if returns or way.gather_s:
            terms["collective"] = way.gather_s + way.return_s
        return Prediction(terms)

    def _timed(self, step: _Step) -> tuple[float, float, float]:
        outputs = self.shape.heads * self.shape.value_dim
        return (
            step.attention_s,
            self.profile.merge.at(step.merged_rows * outputs),
            self.profile.copy_fresh.at(step.pieces_rows * outputs * OUTPUT_BYTES),
        )

    def _combined(self, rows: float) -> float:
        return self.profile.combine.at(self.size * rows * self.shape.heads * self.shape.value_dim)

    @staticmethod
    def _shard(method: str, rank: int, step: int) -> Shard:
        """Which shard a rank meets in a step, by its place before or behind the rank's own."""
        if step == 0:
            return "own"
        if method == "tsp":
            return "earlier"  # All that is hidden is computed, too.
        return "earlier" if rank >= step else "hidden" if method == "tsp_causal" else "later"

    def _step(self, method: str, shard: Shard) -> _Step:
        if shard == "hidden":
            return _Step()
        if method in ("tsp", "tsp_causal"):
            return self._total(partial(self._share, rectangle=method == "tsp", foreign=shard != "own"))
        total = self._total(partial(self._sequence_step, shard))
        if shard == "own" or method == "pass_q":
            return total
        # With earlier results in place, every row that sees anything merges, and nothing is written in pieces.
        return _Step(total.attention_s, total.seen_rows, total.seen_rows + total.merged_rows)

    # Kernels

    @property
    def _computed(self) -> int:
        return math.ceil(self.workload.total_new / self.size)

    @property
    def _kept(self) -> int:
        """Tokens that the fullest rank holds."""
        return math.ceil(self.workload.total / self.size)

    def _sequences(self) -> list[tuple[int, int]]:
        return [(t, p) for t, p in zip(self.workload.new, self.workload.cached, strict=True) if t]

    def _total(self, step: Callable[[int, int], _Step]) -> _Step:
        return _Step(*map(sum, zip(*(step(*lengths) for lengths in self._sequences()), strict=True)))

    def _sequence_step(self, shard: Shard, new: int, cached: int) -> _Step:
        chunk, kept = new / (2 * self.size), cached / self.size
        rows = 2 * chunk
        window = self.shape.window
        if window is not None and window < new + cached:
            return self._windowed(rows, (new + cached) / self.size)
        if shard == "earlier":
            return _Step(self._kernels.block(rows, kept + chunk), rows)
        if shard == "later":
            if chunk < SHORT_RUN:
                return _Step(self._kernels.block(rows, kept + rows), rows)
            attention = self._kernels.block(chunk, kept) + self._kernels.block(chunk, kept + rows)
            seen = rows if cached else chunk
            return _Step(attention, seen, 0.0, seen)
        # In a rank's own shard rows and keys ascend together: one causal square behind the cached keys.
        return _Step(self._kernels.block(rows, kept) + self._kernels.square(rows), rows, rows if cached else 0.0)

    def _share(self, new: int, cached: int, *, rectangle: bool, foreign: bool) -> _Step:
        """The last contiguous shard's queries against their own shard or an earlier one."""
        rows, kept = new / self.size, cached / self.size
        if foreign:
            return _Step(self._kernels.block(rows, kept + rows), rows, rows)
        own = self._kernels.block(rows, rows) if rectangle else self._kernels.square(rows)
        return _Step(self._kernels.block(rows, kept) + own, rows, rows if cached else 0.0)

    def _alone(self, new: int, cached: int) -> _Step:
        window = self.shape.window
        if window is not None and window < new + cached:
            return self._windowed(new, new + cached)
        return _Step(self._kernels.block(new, cached) + self._kernels.square(new), new, new if cached else 0.0)

    def _windowed(self, rows: float, kept: float) -> _Step:
        return _Step(self._kernels.windowed(rows, kept, parts=self.size), rows, 0.0, rows)
