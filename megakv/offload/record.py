"""What the steps of an offloaded model did, what was predicted of them, and when that is known."""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from megakv.base.device import Clock, HostClock
from megakv.distributed.ledger import Ledger
from megakv.offload.host_rank import HostPart
from megakv.offload.link import Link, Traffic
from megakv.offload.method import Plan, Split
from megakv.offload.weight_stream import WeightStream
from megakv.tracking.measurements import OffloadStep


class StepRecord:
    """What one pass over `cached` tokens, and `new` ones, did.

    It is told of moments (`Clock`) of the accelerator, as that at which it began `attending` to a layer; seconds are
    there once it has been `read`.

    `elapsed_s` is the model's forward pass, `gap_s` the time between the pass before and it; `waited_s`, `recompute_s`,
    `attend_s`, `host_s` and `peers_s` go to transfers, recomputing, attending here and on the host, and other ranks.
    `traffic` went to the accelerator, and `byte_seconds` are what the link and the disk take for a byte. A step is
    `steady` where the one before was of the same plan, so that it began as all of its kind do, and `profiled` where
    speeds of the machine were measured meanwhile.
    """

    def __init__(self, *, cached: int, new: int, plan: Plan, kv_bits: int | None = None, clock: Clock | None = None):
        self.cached, self.new, self.plan, self.kv_bits = cached, new, plan, kv_bits
        self.predicted_s = plan.predicted_s
        self.elapsed_s = self.gap_s = self.waited_s = self.recompute_s = 0.0
        self.host_s = self.attend_s = self.peers_s = 0.0
        self.traffic, self.bytes_out, self.weight_bytes = Traffic(), 0, 0
        self.byte_seconds = 0.0, 0.0
        self.steady = self.decoding = self.profiled = False
        self.clock = clock or HostClock()
        self.before: Any = None
        self.begun: Any = None
        self.ended: Any = None
        self.attending: Any = None
        self._spans: defaultdict[str, list[tuple[Any, Any]]] = defaultdict(list)
        self._layers: set[int] = set()
        self._done: Counter[str] = Counter()

    def arrived(self, begun: Any) -> None:
        """A layer's rows are there, waited for since `begun`: attention to them begins."""
        now = self.clock.mark()
        self.waited([(begun, now)])
        if self.attending is None:
            self.attending = now

    def waited(self, spans: Sequence[tuple[Any, Any]]) -> None:
        self._spans["waited"] += spans

    def attended(self, layer: int, parts: Sequence[HostPart], tokens: dict[str, int]) -> None:
        """A layer, or a group in it, was attended to: parts on the host, and what became of its cached tokens."""
        self._layers.add(layer)
        self._done.update(tokens if parts else {**tokens, "on_host": 0, "kept_on_host": 0})
        waits = [part.waited for part in parts if part.waited is not None]
        self.host_s += sum(part.seconds for part in parts)
        self.waited(waits)
        if self.attending is not None:
            self._spans["attended"].append((self.attending, self.clock.mark()))
            self._spans["beside"] += waits
        self.attending = None

    def recomputed(self, begun: Any, landed: Any, ended: Any) -> None:
        """Activations were waited for and recomputed from."""
        self.waited([(begun, landed)])
        self._spans["recomputed"].append((landed, ended))

    def read(self) -> None:
        """Take the seconds of a step to whose end the accelerator has come."""
        self.elapsed_s = self.clock.seconds(self.begun, self.ended)
        self.gap_s = 0.0 if self.before is None else self.clock.seconds(self.before, self.begun)
        kinds = ("waited", "recomputed", "attended", "beside")
        sums = (sum(self.clock.seconds(*span) for span in self._spans[kind]) for kind in kinds)
        self.waited_s, self.recompute_s, attended_s, beside_s = sums
        self.attend_s = attended_s - beside_s
        self._spans.clear()

    @property
    def split(self) -> Split:
        """What became of the cached tokens that are not out of window, in the mean of all layers."""
        return Split(self.cached - self._mean("out_of_window"), *map(self._mean, ("recomputed", "on_host", "resident")))

    @property
    def kept(self) -> int:
        """Beside them, tokens of all heads that as much memory has as came of what compression kept."""
        return self._mean("kept")

    @property
    def kept_on_host(self) -> int:
        """The same of what the host attended to."""
        return self._mean("kept_on_host")

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

    @property
    def measured_s(self) -> float:
        """From the end of the step before to the end of this one."""
        return self.elapsed_s + self.gap_s

    @property
    def bytes_in(self) -> int:
        """Bytes to the accelerator."""
        return self.traffic.nbytes

    @property
    def disk_bytes(self) -> int:
        """Of them, those that lay on disk."""
        return self.traffic.file_bytes

    def report(self) -> OffloadStep:
        """As it stands in the report of a run."""
        busy = zip((self.bytes_in, self.disk_bytes), self.byte_seconds, strict=True)
        link, disk = (nbytes * byte_s / (self.measured_s or math.inf) for nbytes, byte_s in busy)
        alike = ("cached", "predicted_s", "measured_s", "waited_s", "bytes_in", "bytes_out", "weight_bytes", "kv_bits")
        found: dict[str, Any] = {name: getattr(self, name) for name in (*alike, "disk_bytes", "profiled")}
        found |= {
            name: self._mean(name) for name in ("resident", "recomputed", "on_host", "out_of_window", "kept_on_host")
        }
        found["kept"] = self.kept + self.kept_on_host
        found["groups"] = len(self.plan.splits)
        return OffloadStep(plan=self.plan.name, **found, link_utilisation=link, disk_utilisation=disk)


class StepLog:
    """Records of the passes over cached tokens.

    Where the accelerator works behind the thread that tells it what to do, a step's times are known some time after its
    end: nobody waits for them, they are read when a later step begins or ends.

    `learn` is told of every step of decoding, in order, once its times are known; `current` is the pass under way.
    """

    def __init__(self, link: Link, ledger: Ledger, learn: Callable[[StepRecord], None]):
        self.current: StepRecord | None = None
        self._link, self._ledger, self._learn = link, ledger, learn
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

    def begin(self, *, cached: int, new: int, plan: Plan, kv_bits: int | None, ready: bool) -> None:
        """A pass begins; `ready` says whether its first layers are as far as they are in others of its kind."""
        record = StepRecord(cached=cached, new=new, plan=plan, kv_bits=kv_bits, clock=self._link.clock)
        record.steady = ready and plan.name == self._plan
        traffic = self._link.traffic
        self._before = replace(traffic["in"]), traffic["out"].nbytes, self._ledger.waited_s()
        record.before, record.begun = self._ended, record.clock.mark()
        self.current = record

    def end(
        self, weights: WeightStream | None, *, decoding: bool, profiled: bool, byte_seconds: tuple[float, float]
    ) -> None:
        """The pass has succeeded."""
        record, self.current = self.current, None
        if record is None:
            return
        record.ended = record.clock.mark()
        traffic, (into, out, peers_s) = self._link.traffic, self._before
        record.traffic, record.bytes_out = traffic["in"].since(into), traffic["out"].nbytes - out
        record.peers_s = self._ledger.waited_s() - peers_s
        if weights is not None:
            record.waited(weights.waited)
            record.weight_bytes = weights.step_bytes
        record.decoding, record.profiled, record.byte_seconds = decoding, profiled, byte_seconds
        self._ended, self._plan = record.ended, record.plan.name if record.cached and decoding else None
        if record.cached or record.kept or record.kept_on_host:
            self._steps.append(record)
            self._unread.append(record)
        self.read()

    def abandon(self) -> None:
        """What comes next does not follow on what was."""
        self.current = self._plan = self._ended = None

    def read(self) -> None:
        """Learn from steps whose end the accelerator has come to."""
        while self._unread and self._link.clock.passed(self._unread[0].ended):
            record = self._unread.popleft()
            record.read()
            # What compression kept shows nothing of how other tokens are best treated.
            if record.decoding and record.cached:
                self._learn(record)
