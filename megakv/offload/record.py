"""What one step of an offloaded model did, and what was predicted of it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from megakv.costmodel.offload import link_utilisation
from megakv.ledger import Ledger
from megakv.offload.division import Division, Plan
from megakv.offload.host_rank import HostPart
from megakv.offload.link import Link
from megakv.offload.weight_stream import WeightStream
from megakv.tracking.offload import OffloadStep


class StepRecord:
    """What one pass over cached tokens did.

    Parameters
    ----------
    cached, new : int
        Tokens of all sequences on this rank.
    plan : Plan
    kv_bits : int, optional
        Of each key and value off the accelerator, where they are quantised.

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
    busy_s : float
        In which the link to the accelerator was at work.
    link_bytes_s : float
        The link's measured bandwidth.
    steady : bool
        Whether the step before was one of the same plan, so that this one began as all of its kind do.
    """

    def __init__(self, *, cached: int, new: int, plan: Plan, kv_bits: int | None = None):
        self.cached, self.new, self.plan = cached, new, plan
        self.predicted_s = plan.predicted_s
        self.elapsed_s = self.gap_s = self.waited_s = self.recompute_s = self.busy_s = 0.0
        self.host_s = self.attend_s = self.peers_s = 0.0
        self.weight_bytes = 0
        self.link_bytes_s = 0.0
        self.steady = False
        self.kv_bits = kv_bits
        self.bytes_in = self.bytes_out = 0
        self.begun = self.ended = self._attending = 0.0

    def begin(self, link: Link, ledger: Ledger) -> None:
        """Start the clock and the counts."""
        self.bytes_in, self.bytes_out = link.traffic["in"].nbytes, link.traffic["out"].nbytes
        self.busy_s = link.traffic["in"].busy_s
        self.peers_s = ledger.waited_s()
        self.begun = time.perf_counter()

    def finish(self, link: Link, ledger: Ledger, weights: WeightStream | None) -> None:
        """Stop them."""
        self.ended = time.perf_counter()
        self.elapsed_s = self.ended - self.begun
        self.bytes_in = link.traffic["in"].nbytes - self.bytes_in
        self.bytes_out = link.traffic["out"].nbytes - self.bytes_out
        self.busy_s = link.traffic["in"].busy_s - self.busy_s
        self.peers_s = ledger.waited_s() - self.peers_s
        if weights is not None:
            self.waited_s += weights.waited_s
            self.weight_bytes = weights.step_bytes

    def arrived(self, begun: float) -> None:
        """A layer's rows are there, waited for since `begun`: attention to them begins."""
        now = time.perf_counter()
        self.waited_s += now - begun
        self._attending = self._attending or now

    def attended(self, parts: Sequence[HostPart]) -> None:
        """A layer, or a group in it, was attended to, some of it on the host."""
        waited = sum(part.waited_s for part in parts)
        self.host_s += sum(part.seconds for part in parts)
        self.waited_s += waited
        if self._attending:
            self.attend_s += time.perf_counter() - self._attending - waited
        self._attending = 0.0

    @property
    def division(self) -> Division:
        """What became of the cached tokens."""
        return self.plan.division

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
            predicted_s=self.predicted_s,
            measured_s=self.measured_s,
            waited_s=self.waited_s,
            bytes_in=self.bytes_in,
            bytes_out=self.bytes_out,
            weight_bytes=self.weight_bytes,
            kv_bits=self.kv_bits,
            link_utilisation=link_utilisation(self.bytes_in, self.link_bytes_s, self.measured_s),
        )

    @property
    def measured_s(self) -> float:
        """From the end of the step before to the end of this one."""
        return self.elapsed_s + self.gap_s
