"""Timing on all ranks at once: the same calls on every rank, the slowest rank's time on all."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from megakv.device import settle_allocator
from megakv.distributed.comm import Communicator
from megakv.distributed.ledger import Ledger
from megakv.distributed.mesh import Mesh

Key = tuple[object, ...]

COLD_BYTES = 128 << 20
"""Numbers to read from: several times the last-level cache that a rank can hope for."""
ROUNDS = 6
LEAST_ROUNDS = 3
MOST_REPEATS = 100
DECILE = 10
"""Of all samples the lower decile counts: interference only ever adds time, and a minimum is a lucky one."""


def lower_decile(samples: Sequence[float]) -> float:
    return sorted(samples)[(len(samples) - 1) // DECILE]


class Stopwatch:
    def __init__(self, comm: Communicator):
        self.comm = comm
        settle_allocator()

    def once(self, call: Callable[[], object]) -> float:
        """Seconds of one call on this rank, the device's work included."""
        start = time.perf_counter()
        call()
        if self.comm.mesh.device.type != "cpu":
            get_accelerator().synchronize()
        return time.perf_counter() - start

    def slowest(self, seconds: Sequence[float]) -> list[float]:
        """Elementwise maximum over the ranks."""
        return [max(column) for column in zip(*self.comm.gather_objects(list(seconds)), strict=True)]


class Cases:
    """Many short measurements, taken in rounds that spread each of them over the whole time.

    A neighbour who takes the processor for some seconds then disturbs one round of all cases, which the decile forgets.
    """

    def __init__(self, watch: Stopwatch):
        self.watch = watch
        self._calls: dict[Key, Callable[[], object]] = {}
        self._weights: list[float] = []

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, *key: object, call: Callable[[], object], weight: float = 1.0) -> None:
        """Take a case: every rank must add the same ones in the same order; `weight` is of its share of the time."""
        self._calls[key] = call
        self._weights.append(weight)

    def run(self, seconds: float, report: Callable[[], None] | None = None) -> Times:
        """Time all cases in about so many seconds; `report` is called after each case of each round."""
        watch = self.watch
        start = time.perf_counter()
        for call in self._calls.values():
            call()
        watch.comm.barrier()
        first = watch.slowest([watch.once(call) for call in self._calls.values()])
        share = seconds / (ROUNDS * sum(self._weights))
        repeats = [
            min(MOST_REPEATS, max(1, int(weight * share / max(time_s, 1e-7))))
            for weight, time_s in zip(self._weights, first, strict=True)
        ]
        samples: list[list[float]] = [[] for _ in first]
        for taken_rounds in range(ROUNDS):
            spent = watch.slowest([time.perf_counter() - start])[0]
            if taken_rounds >= LEAST_ROUNDS and spent > seconds:
                break
            for call, count, taken in zip(self._calls.values(), repeats, samples, strict=True):
                watch.comm.barrier()
                taken.extend(watch.once(call) for _ in range(count))
                if report is not None:
                    report()
        return Times(dict(zip(self._calls, zip(*watch.comm.gather_objects(samples), strict=True), strict=True)))


class Times:
    """What cases took; samples of one index began together on all ranks, about."""

    def __init__(self, samples: Mapping[Key, tuple[list[float], ...]]):
        self._samples = samples

    def __getitem__(self, key: Key) -> float:
        """Seconds of a case: lower decile of the repeats, slowest rank."""
        return max(lower_decile(taken) for taken in self._samples[key])

    def rising(self, keys: Iterable[Key]) -> tuple[float, ...]:
        """Seconds of cases of ascending size. What a larger one does in less time, a smaller one was disturbed at."""
        seconds = [self[key] for key in keys]
        return tuple(min(seconds[index:]) for index in range(len(seconds)))

    def together(self, key: Key) -> float:
        """Seconds until the last rank is done with a case: mean of the repeats but the longest tenth.

        Where ranks wait for a processor to be given to them, one repeat in three may take several times as long as the
        others, which a median forgets and a pass does not.
        """
        last = sorted(max(column) for column in zip(*self._samples[key], strict=True))
        return statistics.mean(last[: len(last) - (len(last) - 1) // DECILE])

    def straggle(self, key: Key) -> float:
        """How much longer the last rank takes, over the repeats, than the slowest one typically does by itself."""
        alone = max(statistics.median(taken) for taken in self._samples[key])
        last = statistics.median(max(column) for column in zip(*self._samples[key], strict=True))
        return max(0.0, last / alone - 1)


class Pool:
    """Random numbers to read from, larger than any cache: weights, keys and values differ from layer to layer."""

    def __init__(self, dtype: torch.dtype, device: torch.device, nbytes: int = COLD_BYTES):
        self._numbers = torch.rand(nbytes // dtype.itemsize, device=device, dtype=torch.float32).to(dtype)
        self._start = 0
        self.dtype = dtype
        self.device = device

    def take(self, *shape: int) -> Tensor:
        """A contiguous tensor of which no element was taken since the pool was last round."""
        count = math.prod(shape)
        if count > len(self._numbers):
            self._numbers = self._numbers.repeat(-(-count // len(self._numbers)))
        if self._start + count > len(self._numbers):
            self._start = 0
        taken = self._numbers[self._start : self._start + count].view(shape)
        self._start += count
        return taken


class Alone(Communicator):
    """Communicates with nobody, however many ranks there are."""

    def __init__(self, device: torch.device):
        mesh = Mesh(
            rank=0,
            world_size=1,
            cp_size=1,
            cp_rank=0,
            tp_size=1,
            tp_rank=0,
            cp_ranks=(0,),
            tp_ranks=(0,),
            groups={},
            device=device,
            shared_memory=False,
            # Nobody is ever waited for.
            timeout_s=float("inf"),
        )
        super().__init__(mesh, Ledger())
