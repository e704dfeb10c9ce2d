"""What one step of an offloaded model did, and what was predicted of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megakv.costmodel.offload import link_utilisation
from megakv.distributed.ledger import Ledger
from megakv.offload.clock import Clock, HostClock
from megakv.offload.division import Division, Plan
from megakv.offload.host_rank import HostPart
from megakv.offload.link import Link
from megakv.offload.weight_stream import WeightStream
from megakv.tracking.measurements import OffloadStep

if TYPE_CHECKING:
    from megakv.offload.staging import StagedLayer


class StepRecord:
    """What one pass over cached tokens did.

    It is told of moments (`megakv.offload.clock`); seconds are there once it has been `read`.

    Parameters
    ----------
    cached, new : int
        Tokens of all sequences on this rank.
    plan : Plan
    kv_bits : int, optional
        Of each key and value off the accelerator, where they are quantised.
    clock : Clock, optional
        Of the accelerator; the host's own if left out.

    Attributes
    ----------
    predicted_s, elapsed_s, gap_s : float
        Predicted time from step to step; measured time of the model's forward pass, and between the pass before and it.
    waited_s, recompute_s, attend_s, host_s : float
        Waiting for transfers, recomputing, and attending here and on the host.
    peers_s : float
        Waiting for other ranks.
    bytes_in, bytes_out : int
        Sent to the accelerator and from it meanwhile.
    disk_bytes : int
        Of `bytes_in`, what lay on disk.
    timed_bytes, busy_s : int, float
        Sent to the accelerator by transfers that were found to have ended meanwhile, and seconds that these took.
    mixed_bytes, timed_disk_bytes, mixed_s : int, int, float
        Of those transfers that brought any from disk: their bytes, those from disk, and seconds.
    link_bytes_s, disk_bytes_s : float
        Measured bandwidths of the link and of reading the disk; 0 without a disk.
    steady : bool
        Whether the step before was one of the same plan, so that this one began as all of its kind do.
    decoding : bool
        Whether it was a step of decoding.
    profiled : bool
        Whether speeds of the machine were measured meanwhile.
    ended : object
        The moment at which it ended.
    """

    def __init__(self, *, cached: int, new: int, plan: Plan, kv_bits: int | None = None, clock: Clock | None = None):
        self.cached, self.new, self.plan = cached, new, plan
        self.predicted_s = plan.predicted_s
        self.elapsed_s = self.gap_s = self.waited_s = self.recompute_s = self.busy_s = 0.0
        self.host_s = self.attend_s = self.peers_s = 0.0
        self.weight_bytes = self.timed_bytes = 0
        self.link_bytes_s = self.disk_bytes_s = 0.0
        self.steady = self.decoding = self.profiled = False
        self.kv_bits = kv_bits
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
        inwards = link.traffic["in"]
        self.bytes_in, self.bytes_out = inwards.nbytes, link.traffic["out"].nbytes
        self.timed_bytes, self.busy_s = inwards.timed_bytes, inwards.busy_s
        self.disk_bytes, self.timed_disk_bytes = inwards.file_bytes, inwards.timed_file_bytes
        self.mixed_bytes, self.mixed_s = inwards.mixed_bytes, inwards.mixed_s
        self.peers_s = ledger.waited_s()
        self._before, self._begun = before, self.clock.mark()

    def finish(self, link: Link, ledger: Ledger, weights: WeightStream | None) -> None:
        """Stop them."""
        self.ended = self.clock.mark()
        inwards = link.traffic["in"]
        self.bytes_in = inwards.nbytes - self.bytes_in
        self.bytes_out = link.traffic["out"].nbytes - self.bytes_out
        self.timed_bytes, self.busy_s = inwards.timed_bytes - self.timed_bytes, inwards.busy_s - self.busy_s
        self.disk_bytes = inwards.file_bytes - self.disk_bytes
        self.timed_disk_bytes = inwards.timed_file_bytes - self.timed_disk_bytes
        self.mixed_bytes, self.mixed_s = inwards.mixed_bytes - self.mixed_bytes, inwards.mixed_s - self.mixed_s
        self.peers_s = ledger.waited_s() - self.peers_s
        if weights is not None:
            self._waited += weights.waited
            self.weight_bytes = weights.step_bytes

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

    def count(self, layer: int, staged: StagedLayer | None, *, on_host: bool) -> None:
        """A layer, or a group in it, was attended to: what became of its cached tokens.

        Parameters
        ----------
        layer : int
        staged : StagedLayer, optional
            What was brought of it; None where nothing was cached.
        on_host : bool
            Whether the host attended to those that were left to it.
        """
        self._layers.add(layer)
        if staged is not None:
            left = sum(staged.away) - sum(staged.unseen)
            self._done.update(
                recomputed=sum(staged.splits),
                on_host=left if on_host else 0,
                resident=staged.resident,
                unseen=sum(staged.unseen),
            )

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
    def division(self) -> Division:
        """What became of the cached tokens that are not unseen, in the mean of all layers, whatever was planned."""
        return Division(
            self.cached - self._mean("unseen"), self._mean("recomputed"), self._mean("on_host"), self._mean("resident")
        )

    def _mean(self, kind: str) -> int:
        """Tokens of a kind in a layer."""
        return round(self._done[kind] / len(self._layers)) if self._layers else 0

    @property
    def sequences(self) -> float:
        """Of a group, in a step of decoding."""
        return self.new / len(self.plan.divisions)

    @property
    def usual(self) -> bool:
        """Whether one step followed the other at once: where somebody thought in between, times show that."""
        return self.gap_s <= self.elapsed_s

    def report(self) -> OffloadStep:
        """As it stands in the report of a run."""
        return OffloadStep(
            cached=self.cached,
            plan=self.plan.name,
            resident=self.division.resident,
            recomputed=self.division.recomputed,
            on_host=self.division.on_host,
            unseen=self._mean("unseen"),
            predicted_s=self.predicted_s,
            measured_s=self.measured_s,
            waited_s=self.waited_s,
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out,
            weight_bytes=self.weight_bytes,
            kv_bits=self.kv_bits,
            link_utilisation=link_utilisation(self.bytes_in, self.link_bytes_s, self.measured_s),
            disk_bytes=self.disk_bytes,
            disk_utilisation=link_utilisation(self.disk_bytes, self.disk_bytes_s, self.measured_s),
            profiled=self.profiled,
        )

    @property
    def measured_s(self) -> float:
        """From the end of the step before to the end of this one."""
        return self.elapsed_s + self.gap_s
