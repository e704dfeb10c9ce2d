"""The steps of a generation: the one under way, those that have ended, and those that nobody has learned from yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from megakv.distributed.ledger import Ledger
from megakv.offload.division import Plan
from megakv.offload.link import Link
from megakv.offload.record import StepRecord
from megakv.offload.weight_stream import WeightStream


class StepLog:
    """Records of the passes over cached tokens.

    Where the accelerator works behind the thread that tells it what to do, a step's times are known some time after its
    end: nobody waits for them, they are read when a later step begins or ends.

    Parameters
    ----------
    link : Link
    learn : callable
        Told of every step of decoding, in order, once its times are known.

    Attributes
    ----------
    current : StepRecord or None
        Of the pass under way.
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
