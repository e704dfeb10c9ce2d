"""Timing on all ranks at once: the same calls on every rank, the slowest rank's time on all."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from megakv.base.device import settle_allocator
from megakv.distributed.comm import Communicator
from megakv.distributed.ledger import Ledger
from megakv.distributed.mesh import Mesh

COLD_BYTES = 128 << 20
"""Numbers to read from: several times the last-level cache that a rank can hope for."""
ROUNDS = 6
LEAST_ROUNDS = 3
MOST_REPEATS = 100
DECILE = 10
"""Of all samples the lower decile counts: interference only ever adds time, and a minimum is a lucky one."""


def lower_decile(samples: Sequence[float]) -> float:
    return sorted(samples)[(len(samples) - 1) // DECILE]


def timed(call: Callable[[], object]) -> float:
    """Seconds of one call on this rank, the accelerator's work included."""
    get_accelerator().synchronize()
    start = time.perf_counter()
    call()
    get_accelerator().synchronize()
    return time.perf_counter() - start


def slowest(comm: Communicator, seconds: Sequence[float]) -> list[float]:
    """Elementwise maximum over the ranks."""
    return [max(column) for column in zip(*comm.gather_objects(list(seconds)), strict=True)]


@dataclass
class Case:
    """One short measurement, and what it took once all cases have run."""

    call: Callable[[], object]
    weight: float = 1.0  # Of its share of the time.
    samples: Sequence[Sequence[float]] = ()  # By rank; those of one index began together on all ranks, about.

    @property
    def seconds(self) -> float:
        """Lower decile of the repeats, slowest rank."""
        return max(map(lower_decile, self.samples))

    @property
    def together(self) -> float:
        """Seconds until the last rank is done: mean of the repeats but the longest tenth.

        Where ranks wait for a processor to be given to them, one repeat in three may take several times as long as the
        others, which a median forgets and a pass does not.
        """
        last = sorted(map(max, zip(*self.samples, strict=True)))
        return statistics.mean(last[: len(last) - (len(last) - 1) // DECILE])

    @property
    def straggle(self) -> float:
        """How much longer the last rank takes, over the repeats, than the slowest one typically does by itself."""
        alone = max(map(statistics.median, self.samples))
        return max(0.0, statistics.median(map(max, zip(*self.samples, strict=True))) / alone - 1)

    @property
    def jitter(self) -> float:
        """How much longer the last rank takes, in the mean, than the slowest one typically does by itself."""
        alone = max(map(statistics.median, self.samples))
        return max(0.0, self.together / alone - 1) if len(self.samples) > 1 else 0.0


def rising(cases: Sequence[Case]) -> tuple[float, ...]:
    """Seconds of cases of ascending size. What a larger one does in less time, a smaller one was disturbed at."""
    seconds = [case.seconds for case in cases]
    return tuple(min(seconds[index:]) for index in range(len(seconds)))


class Cases:
    """Many short measurements, taken in rounds that spread each of them over the whole time.

    A neighbour who takes the processor for some seconds then disturbs one round of all cases, which the decile forgets.
    """

    def __init__(self, comm: Communicator):
        self.comm = comm
        self._cases: list[Case] = []
        settle_allocator()

    def __len__(self) -> int:
        return len(self._cases)

    def add(self, call: Callable[[], object], *, weight: float = 1.0) -> Case:
        """Take a case: every rank must add the same ones in the same order."""
        self._cases.append(Case(call, weight))
        return self._cases[-1]

    def run(self, seconds: float, report: Callable[[], None] | None = None) -> None:
        """Time all cases in about so many seconds; `report` is called after each case of each round."""
        start, comm = time.perf_counter(), self.comm
        for case in self._cases:
            case.call()
        comm.barrier()
        first = slowest(comm, [timed(case.call) for case in self._cases])
        share = seconds / (ROUNDS * sum(case.weight for case in self._cases))
        repeats = [
            min(MOST_REPEATS, max(1, int(case.weight * share / max(time_s, 1e-7))))
            for case, time_s in zip(self._cases, first, strict=True)
        ]
        samples: list[list[float]] = [[] for _ in first]
        for taken_rounds in range(ROUNDS):
            spent = slowest(comm, [time.perf_counter() - start])[0]
            if taken_rounds >= LEAST_ROUNDS and spent > seconds:
                break
            for case, count, taken in zip(self._cases, repeats, samples, strict=True):
                comm.barrier()
                taken.extend(timed(case.call) for _ in range(count))
                if report is not None:
                    report()
        for case, ranks in zip(self._cases, zip(*comm.gather_objects(samples), strict=True), strict=True):
            case.samples = ranks


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
