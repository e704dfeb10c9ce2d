"""What only a real accelerator can be asked: the rate of its link, and how busy its kernels keep it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable

import torch

COPY_BYTES = 1 << 30
REPEATS = 5
TRANSFERS = ("Memcpy", "Memset")


def pinned_copy_gb_s(device: torch.device) -> float:
    """GB/s of one large copy from page-locked memory to the accelerator: the median of several."""
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    there.copy_(host)
    rates = []
    for _ in range(REPEATS):
        torch.cuda.synchronize(device)
        begun = time.perf_counter()
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize(device)
        rates.append(COPY_BYTES / (time.perf_counter() - begun) / 1e9)
    return statistics.median(rates)


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How much of a line some spans cover, of which several may lie over each other."""
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


class KernelWatch:
    """Looks, from one token of a generation to another, in how much of the time the accelerator computes."""

    def __init__(self, first: int, last: int):
        self.busy: float | None = None
        self._first, self._last = first, last
        self._begun = 0.0
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])

    def token(self, number: int) -> None:
        """A token is there, and nothing is computed."""
        if number == self._first:
            self._profile.start()
            self._begun = time.perf_counter()
        elif number == self._last:
            seconds = time.perf_counter() - self._begun
            self._profile.stop()
            kernels = [
                (event.time_range.start, event.time_range.end)
                for event in self._profile.events()
                if event.device_type == torch.autograd.DeviceType.CUDA and not event.name.startswith(TRANSFERS)
            ]
            # In microseconds.
            self.busy = covered(kernels) / 1e6 / seconds
