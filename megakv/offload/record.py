"""What the steps of an offloaded model did, what was predicted of them, and when that is known."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

from megakv.distributed.ledger import Ledger
from megakv.offload.clock import Clock, HostClock
from megakv.offload.host_rank import HostPart
from megakv.offload.link import Link
from megakv.offload.split import Plan, Split
from megakv.offload.weight_stream import WeightStream
from megakv.tracking.measurements import OffloadStep


class StepRecord:
    """What one pass over `cached` tokens, and `new` ones, did.

    It is told of moments (`megakv.offload.clock`) of the accelerator; seconds are there once it has been `read`.

    `elapsed_s` is the model's forward pass, `gap_s` the time between the pass before and it; `waited_s`, `recompute_s`,
    `attend_s`, `host_s` and `peers_s` go to transfers, recomputing, attending here and on the host, and
    other ranks. Of the bytes to the accelerator, `disk_bytes` lay on disk, and `timed_bytes` came by transfers that
    were found to have ended meanwhile, in `busy_s`; of these `mixed_bytes`, in `mixed_s`, by transfers that brought
    `timed_disk_bytes` from disk. A step is `steady` where the one before was of the same plan, so that it began as all
    of its kind do, and `profiled` where speeds of the machine were measured meanwhile.
    """

    def __init__(self, *, cached: int, new: int, plan: Plan, kv_bits: int | None = None, clock: Clock | None = None):
        self.cached, self.new, self.plan, self.kv_bits = cached, new, plan, kv_bits
        self.predicted_s = plan.predicted_s
        self.elapsed_s = self.gap_s = self.waited_s = self.recompute_s = self.busy_s = 0.0
        self.host_s = self.attend_s = self.peers_s = 0.0
        self.weight_bytes = self.timed_bytes = 0
        self.link_bytes_s = self.disk_bytes_s = 0.0
        self.steady = self.decoding = self.profiled = False
        self.bytes_in = self.bytes_out = self.disk_bytes = 0
        self.mixed_bytes, self.timed_disk_bytes, self.mixed_s = 0, 0, 0.0
        self.clock = clock or HostClock()
        self.ended: Any = None
        self._begun: Any = None
        self._before: Any = None
        self._attending: Any = None
        self._waited: list[tuple[Any, Any]] = []
        self._recomputed: list[tuple[Any, Any]] = []
        self._attended: list[tuple[Any, Any]] = []
        self._beside: list[tuple[Any, Any]] = []
        self._layers: set[int] = set()
        self._done: Counter[str] = Counter()

    def begin(self, link: Link, ledger: Ledger, before: Any) -> None:
        """Start the clock and the counts; `before` is the moment at which the step before ended, or None."""
        self._counted = self._counts(link, ledger)
        self._before, self._begun = before, self.clock.mark()

    def finish(self, link: Link, ledger: Ledger, weights: WeightStream | None) -> None:
        """Stop them."""
        self.ended = self.clock.mark()
        for name, value in self._counts(link, ledger).items():
            setattr(self, name, value - self._counted[name])
        if weights is not None:
            self._waited += weights.waited
            self.weight_bytes = weights.step_bytes

    @staticmethod
    def _counts(link: Link, ledger: Ledger) -> dict[str, Any]:
        into = link.traffic["in"]
        return {
            "bytes_in": into.nbytes,
            "bytes_out": link.traffic["out"].nbytes,
            "timed_bytes": into.timed_bytes,
            "busy_s": into.busy_s,
            "disk_bytes": into.file_bytes,
            "timed_disk_bytes": into.timed_file_bytes,
            "mixed_bytes": into.mixed_bytes,
            "mixed_s": into.mixed_s,
            "peers_s": ledger.waited_s(),
        }

    @property
    def attending(self) -> bool:
        """Whether attention to a layer's rows has begun."""
        return self._attending is not None

    def arrived(self, begun: Any) -> None:
        """A layer's rows are there, waited for since `begun`: attention to them begins."""
        now = self.clock.mark()
        self._waited.append((begun, now))
        if self._attending is None:
            self._attending = now

    def attended(self, parts: Sequence[HostPart]) -> None:
        """A layer, or a group in it, was attended to, some of it on the host."""
        waits = [part.waited for part in parts if part.waited is not None]
        self.host_s += sum(part.seconds for part in parts)
        self._waited += waits
        if self._attending is not None:
            self._attended.append((self._attending, self.clock.mark()))
            self._beside += waits
        self._attending = None

    def count(self, layer: int, recomputed: int = 0, on_host: int = 0, resident: int = 0, unseen: int = 0) -> None:
        """A layer, or a group in it, was attended to: what became of its cached tokens."""
        self._layers.add(layer)
        self._done.update(recomputed=recomputed, on_host=on_host, resident=resident, unseen=unseen)

    def recomputed(self, begun: Any, landed: Any, ended: Any) -> None:
        """Activations were waited for and recomputed from."""
        self._waited.append((begun, landed))
        self._recomputed.append((landed, ended))

    @property
    def known(self) -> bool:
        """Whether the accelerator has come to the end of the step."""
        return self.ended is not None and self.clock.passed(self.ended)

    def read(self) -> None:
        """Take the seconds of a step that is `known`."""
        self.elapsed_s = self.clock.seconds(self._begun, self.ended)
        self.gap_s = 0.0 if self._before is None else self.clock.seconds(self._before, self._begun)
        self.waited_s, self.recompute_s = self._sum(self._waited), self._sum(self._recomputed)
        self.attend_s = self._sum(self._attended) - self._sum(self._beside)
        for spans in (self._waited, self._recomputed, self._attended, self._beside):
            spans.clear()

    def _sum(self, spans: Sequence[tuple[Any, Any]]) -> float:
        return sum(self.clock.seconds(first, last) for first, last in spans)

    @property
    def split(self) -> Split:
        """What became of the cached tokens that are not unseen, in the mean of all layers, whatever was planned."""
        return Split(self.cached - self._mean("unseen"), *map(self._mean, ("recomputed", "on_host", "resident")))

    def _mean(self, kind: str) -> int:
        """Tokens of a kind in a layer."""
        return round(self._done[kind] / len(self._layers)) if self._layers else 0

    @property
    def sequences(self) -> float:
        """Of a group, in a step of decoding."""
        return self.new / len(self.plan.splits)

    @property
    def usual(self) -> bool:
        """Whether one step followed the other at once: where somebody thought in between, times show that."""
        return self.gap_s <= self.elapsed_s

    def report(self) -> OffloadStep:
        """As it stands in the report of a run."""

        def utilisation(nbytes: int, bytes_s: float) -> float:
            carried = bytes_s * self.measured_s
            return nbytes / carried if carried else 0.0

        return OffloadStep(
            plan=self.plan.name,
            cached=self.cached,
            resident=self._mean("resident"),
            recomputed=self._mean("recomputed"),
            on_host=self._mean("on_host"),
            unseen=self._mean("unseen"),
            predicted_s=self.predicted_s,
            measured_s=self.measured_s,
            waited_s=self.waited_s,
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out,
            weight_bytes=self.weight_bytes,
            kv_bits=self.kv_bits,
            link_utilisation=utilisation(self.bytes_in, self.link_bytes_s),
            disk_bytes=self.disk_bytes,
            disk_utilisation=utilisation(self.disk_bytes, self.disk_bytes_s),
            profiled=self.profiled,
        )

    @property
    def measured_s(self) -> float:
        """From the end of the step before to the end of this one."""
        return self.elapsed_s + self.gap_s


class StepLog:
    """Records of the passes over cached tokens.

    Where the accelerator works behind the thread that tells it what to do, a step's times are known some time after its
    end: nobody waits for them, they are read when a later step begins or ends.

    `learn` is told of every step of decoding, in order, once its times are known; `current` is the pass under way.
    """

    def __init__(self, link: Link, learn: Callable[[StepRecord], None]):
        self.current: StepRecord | None = None
        self._link, self._learn = link, learn
        self._steps: list[StepRecord] = []
        self._unread: deque[StepRecord] = deque()
        self._plan: str | None = None
        self._ended: Any = None

    @property
    def steps(self) -> list[StepRecord]:
        """Those of the latest generation that have ended."""
        self.read()
        return self._steps

    def clear(self) -> None:
        """A generation begins."""
        self.read()
        self._steps.clear()

    def begin(self, ledger: Ledger, *, cached: int, new: int, plan: Plan, kv_bits: int | None, ready: bool) -> None:
        """A pass begins; `ready` says whether its first layers are as far as they are in others of its kind."""
        record = StepRecord(cached=cached, new=new, plan=plan, kv_bits=kv_bits, clock=self._link.clock)
        record.steady = ready and plan.name == self._plan
        record.begin(self._link, ledger, self._ended)
        self.current = record

    def end(self, ledger: Ledger, weights: WeightStream | None, *, decoding: bool, rates: tuple[float, float]) -> None:
        """The pass has succeeded; `rates` are the bandwidths of the link and of the disk."""
        record, self.current = self.current, None
        if record is None:
            return
        record.finish(self._link, ledger, weights)
        record.decoding, (record.link_bytes_s, record.disk_bytes_s) = decoding, rates
        self._ended, self._plan = record.ended, record.plan.name if record.cached and decoding else None
        if record.cached:
            self._steps.append(record)
            self._unread.append(record)
        self.read()

    def abandon(self) -> None:
        """What comes next does not follow on what was."""
        self.current = self._plan = self._ended = None

    def read(self) -> None:
        """Learn from steps whose end the accelerator has come to."""
        while self._unread and self._unread[0].known:
            record = self._unread.popleft()
            record.read()
            if record.decoding:
                self._learn(record)
