"""An accelerator's streams and events in threads of this process: real copies, in order, beside computation."""

from __future__ import annotations

import ctypes
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from megakv.distributed.sharding import IntArray
from megakv.offload.cuda_link import CudaStreams


class Moment:
    """What `torch.cuda.Event` is."""

    def __init__(self) -> None:
        self.at = 0.0
        self._over = threading.Event()

    def happen(self) -> None:
        self.at = time.perf_counter()
        self._over.set()

    def wait(self, stream: Any) -> None:
        stream.put(self.synchronize)

    def query(self) -> bool:
        return self._over.is_set()

    def synchronize(self) -> None:
        assert self._over.wait(20)

    def elapsed_time(self, end: Moment) -> float:
        assert self.query() and end.query(), "an event is asked for its time before it is over"
        return 1e3 * (end.at - self.at)


class Ahead:
    """A stream that is behind whoever queues work in it."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, work: Callable[[], object]) -> None:
        self._work.put(work)

    def synchronize(self) -> None:
        over = Moment()
        self.put(over.happen)
        over.synchronize()

    @torch.inference_mode()
    def _run(self) -> None:
        while True:
            self._work.get()()


class AtOnce:
    """A stream that whoever queues work in it waits for, as a processor does."""

    def put(self, work: Callable[[], object]) -> None:
        work()


class ThreadStreams(CudaStreams):
    """The streams of such an accelerator.

    Parameters
    ----------
    compute : Ahead or AtOnce
        What threads compute in.
    """

    def __init__(self, compute: Any = None):
        self.compute = compute or AtOnce()
        self.copied: list[int] = []
        self.entered: list[threading.Thread] = []

    def stream(self) -> Any:
        return Ahead()

    def current(self) -> Any:
        return self.compute

    def event(self, stream: Any, *, timed: bool) -> Moment:
        moment = Moment()
        stream.put(moment.happen)
        return moment

    def copy(self, stream: Any, to: IntArray, source: IntArray, sizes: IntArray, holds: Iterable[Tensor]) -> None:
        held = list(holds)
        for ends in zip(to.tolist(), source.tolist(), sizes.tolist(), strict=True):
            self.copied.append(ends[2])
            stream.put(lambda ends=ends, held=held: ctypes.memmove(*ends))

    def pinned(self, nbytes: int) -> Tensor:
        # Pinned for the device of the thread that asks.
        assert threading.current_thread() in self.entered
        return torch.empty(nbytes, dtype=torch.uint8)

    def enter_thread(self) -> None:
        self.entered.append(threading.current_thread())
