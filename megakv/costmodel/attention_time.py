"""Predicted seconds of one attention layer by method, from a hardware profile.

What a rank computes in each step of a ring follows from the balanced layout (context parallelism, Section 3.5.1): of
2N chunks, rank i has chunks i and 2N-1-i. Of its own shard it sees a causal square; of an earlier rank's the first
chunk, with all its rows; of a later rank's both chunks, with its second half of rows: the same number of pairs, in
differently shaped kernel calls. Cached tokens are seen by every row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from megakv.attention.visibility import SHORT_RUN
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.kernels import Kernels
from megakv.costmodel.shape import AttentionShape

Shard = Literal["own", "earlier", "later"]
OUTPUT_BYTES = 4
DECODING = "pass_q_decoding"
"""What `step_overhead_s` of a profile calls pass-Q of fewer than 2N tokens a sequence."""


@dataclass
class Prediction:
    """Seconds of one layer's attention, by what they go to."""

    method: str
    # ``attention`` (kernels), ``exposed`` (ring exchange that attention does not hide), ``collective`` (All2All or
    # all-gather), ``straggle`` (waiting in it for the last rank), ``merge``, ``copy`` (packing messages), ``overhead``.
    terms: dict[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """All terms together."""
        return sum(self.terms.values())

    def add(self, term: str, seconds: float) -> None:
        """Count seconds towards a term."""
        self.terms[term] = self.terms.get(term, 0.0) + seconds


@dataclass(frozen=True)
class _Step:
    """One rank's queries against one shard: kernels, rows that see anything, rows merged or written on the way."""

    attention_s: float = 0.0
    seen_rows: float = 0.0
    merged_rows: float = 0.0
    pieces_rows: float = 0.0

    def __add__(self, other: _Step) -> _Step:
        return _Step(
            self.attention_s + other.attention_s,
            self.seen_rows + other.seen_rows,
            self.merged_rows + other.merged_rows,
            self.pieces_rows + other.pieces_rows,
        )


class LayerTimes:
    """Predictions for one attention layer of one pass.

    shape: of the rank with the most heads.
    """

    def __init__(self, profile: HardwareProfile, shape: AttentionShape, workload: Workload):
        self.profile = profile
        self.shape = shape
        self.workload = workload
        self.size = workload.size
        self._kernels = Kernels(profile, shape)

    def predict(self, method: str) -> Prediction:
        """Seconds of a method; a pass of fewer than 2N tokens a sequence goes the way of decoding."""
        if self.size == 1:
            prediction = Prediction(method)
            prediction.add("attention", sum((self._alone(t, p) for t, p in self._sequences()), _Step()).attention_s)
            return prediction
        if method == "replicated":
            return self._replicated()
        if max(self.workload.new) < 2 * self.size:
            return self._decoding_pass_q()
        if method in ("tsp", "tsp_causal"):
            return self._tsp(method)
        if method == "pass_q":
            return max((self._pass_q(shard) for shard in _SHARDS), key=lambda p: p.seconds)
        chosen = self._all_gather if method == "all_gather" else self._pass_kv
        return max((chosen(shard) for shard in _SHARDS), key=lambda p: p.seconds)

    def predict_last(self, method: str) -> Prediction:
        """Seconds of a last layer that one token of each sequence is asked of: such queries travel, as in decoding."""
        work, size = self.workload, self.size
        asked = tuple(min(1, new) for new in work.new)
        rest = tuple(t + p - one for t, p, one in zip(work.new, work.cached, asked, strict=True))
        few = LayerTimes(self.profile, self.shape, Workload(asked, rest, size))
        if size == 1 or method in ("pass_kv", "pass_q"):
            return few.predict("pass_q")
        prediction = self._gathered(method)
        prediction.add("attention", sum(self._kernels.block(1, new + cached) for new, cached in self._sequences()))
        return prediction

    # Prefill: after its own, the first rank meets only later ranks' shards and the last only earlier ones'.
    # The slowest rank sets the time.

    def _pass_kv(self, shard: Shard) -> Prediction:
        prediction = Prediction("pass_kv")
        message = self.shape.kv_row_bytes * self._kept
        self._copied(prediction, message)
        steps = [self._step("own"), *[self._step(shard, merging=True)] * (self.size - 1)]
        self._ring(prediction, steps, self.profile.exchange.at(message))
        return prediction

    def _pass_q(self, shard: Shard) -> Prediction:
        prediction = Prediction("pass_q")
        message = self.shape.query_row_bytes * self._computed
        self._copied(prediction, message)
        steps = [self._step("own"), *[self._step(shard)] * (self.size - 1)]
        self._ring(prediction, steps, self.profile.exchange.at(message))
        self._return(prediction, self._computed, self.workload.total_new - self._computed)
        return prediction

    def _all_gather(self, shard: Shard) -> Prediction:
        prediction = self._gathered("all_gather")
        steps = [self._step("own"), *[self._step(shard, merging=True)] * (self.size - 1)]
        self._ring(prediction, steps, 0.0)
        return prediction

    def _gathered(self, method: str) -> Prediction:
        """Bringing all keys and values to every rank."""
        prediction = Prediction(method)
        message = self.shape.kv_row_bytes * self._kept
        self._copied(prediction, message)
        prediction.add("collective", self.profile.all_gather.at(message * (self.size - 1)))
        return prediction

    def _tsp(self, method: str) -> Prediction:
        """Even contiguous shards: the last rank sees all others', and merges most."""
        prediction = self._gathered(method)
        steps = [self._shares(method == "tsp"), *[self._shares(False, foreign=True)] * (self.size - 1)]
        self._ring(prediction, steps, 0.0)
        return prediction

    # Decoding

    def _decoding_pass_q(self) -> Prediction:
        prediction = Prediction("pass_q")
        message = self.shape.query_row_bytes * self._computed
        self._copied(prediction, message)
        total = 0.0
        for new, cached in self._sequences():
            rows = math.ceil(new / self.size)
            total += new / rows * self._kernels.block(rows, (new + cached) / self.size)
        # At every step other sequences are at other ranks: together a rank attends to each of them once.
        steps = [_Step(total / self.size)] * self.size
        self._ring(prediction, steps, self.profile.exchange.at(message), known_as=DECODING)
        # The rank with the fewest queries of its own sends most, and all wait for it.
        self._return(prediction, self._computed, self.workload.total_new - self.workload.total_new // self.size)
        return prediction

    def _replicated(self) -> Prediction:
        prediction = Prediction("replicated")
        rows = self.workload.total_new
        for new, cached in self._sequences():
            prediction.add("attention", self._kernels.block(new, (new + cached) / self.size))
        partial = rows * self.shape.partial_row_bytes
        self._copied(prediction, partial)
        self._gathered_last(prediction, self.profile.all_gather.at(partial * (self.size - 1)))
        self._combined(prediction, rows)
        self._overhead(prediction)
        return prediction

    # Terms

    def _ring(self, prediction: Prediction, steps: list[_Step], transfer_s: float, *, known_as: str = "") -> None:
        outputs = self.shape.heads * self.shape.value_dim
        for index, step in enumerate(steps):
            merge = self.profile.merge.at(step.merged_rows * outputs)
            copy = self.profile.copy_fresh.at(step.pieces_rows * outputs * OUTPUT_BYTES)
            prediction.add("attention", step.attention_s)
            prediction.add("merge", merge)
            prediction.add("copy", copy)
            if index + 1 < len(steps):
                busy = step.attention_s + merge + copy
                prediction.add("exposed", self.profile.overlapped(busy, transfer_s) - busy)
        self._overhead(prediction, known_as)

    def _return(self, prediction: Prediction, rows: float, foreign_rows: float) -> None:
        # Every part is joined with its log-sum-exp, then all are joined to one buffer.
        fresh, part = self.profile.copy_fresh, rows * self.shape.partial_row_bytes
        prediction.add("copy", self.size * fresh.at(part) + fresh.at(self.size * part))
        self._gathered_last(prediction, self.profile.all_to_all.at(foreign_rows * self.shape.partial_row_bytes))
        self._combined(prediction, rows)

    def _gathered_last(self, prediction: Prediction, seconds: float) -> None:
        """A collective behind attention: a ring leaves its ranks a step of slack, here all wait for the last one."""
        prediction.add("straggle", self.profile.straggle * prediction.terms.get("attention", 0.0))
        prediction.add("collective", seconds)

    def _combined(self, prediction: Prediction, rows: float) -> None:
        elements = self.size * rows * self.shape.heads * self.shape.value_dim
        prediction.add("merge", self.profile.combine.at(elements))

    def _copied(self, prediction: Prediction, nbytes: float) -> None:
        prediction.add("copy", self.profile.copy_bytes.at(nbytes))

    def _overhead(self, prediction: Prediction, known_as: str = "") -> None:
        known = self.profile.step_overhead_s
        prediction.add("overhead", self.size * known.get(known_as, known.get(prediction.method, 0.0)))

    # Kernels

    @property
    def _computed(self) -> int:
        """Tokens that the fullest rank computes."""
        return math.ceil(self.workload.total_new / self.size)

    @property
    def _kept(self) -> int:
        """Tokens that the fullest rank holds."""
        return math.ceil(self.workload.total / self.size)

    def _sequences(self) -> list[tuple[int, int]]:
        return [(t, p) for t, p in zip(self.workload.new, self.workload.cached, strict=True) if t]

    def _step(self, shard: Shard, *, merging: bool = False) -> _Step:
        total = sum((self._sequence_step(shard, t, p) for t, p in self._sequences()), _Step())
        if not merging:
            return total
        # With earlier results in place, every row that sees anything merges, and nothing is written in pieces.
        return _Step(total.attention_s, total.seen_rows, total.seen_rows + total.merged_rows)

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

    def _shares(self, rectangle: bool, *, foreign: bool = False) -> _Step:
        """The last contiguous shard's queries against their own shard or an earlier one."""
        total = _Step()
        for new, cached in self._sequences():
            rows, kept = new / self.size, cached / self.size
            if foreign:
                step = _Step(self._kernels.block(rows, kept + rows), rows, rows)
            else:
                own = self._kernels.block(rows, rows) if rectangle else self._kernels.square(rows)
                step = _Step(self._kernels.block(rows, kept) + own, rows, rows if cached else 0.0)
            total = total + step
        return total

    def _alone(self, new: int, cached: int) -> _Step:
        window = self.shape.window
        if window is not None and window < new + cached:
            return self._windowed(new, new + cached)
        return _Step(self._kernels.block(new, cached) + self._kernels.square(new), new, new if cached else 0.0)

    def _windowed(self, rows: float, kept: float) -> _Step:
        return _Step(self._kernels.windowed(rows, kept, parts=self.size), rows, 0.0, rows)


_SHARDS: tuple[Shard, Shard] = ("earlier", "later")
