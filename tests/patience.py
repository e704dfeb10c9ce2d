"""Limits of time that say the same on a machine of one's own and on one that many share."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import psutil


class Patience:
    """So many seconds of a machine of one's own: time that others had goes by uncounted.

    Where more wants to run than there are processors, each gets its part of them. Time is counted when it is asked, so
    that it must be asked often.
    """

    def __init__(self, seconds: float):
        self._left, self._at = seconds, time.monotonic()

    @property
    def over(self) -> bool:
        now = time.monotonic()
        self._left -= (now - self._at) * _share()
        self._at = now
        return self._left <= 0


def _share() -> float:
    """The part of a processor that whoever wants to run gets now."""
    running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    return min(1.0, len(os.sched_getaffinity(0)) / max(1, running))


def holds_within(seconds: float, condition: Callable[[], Any], *, every_s: float = 0.05) -> bool:
    """Wait until a condition holds: whether it did in time."""
    patience = Patience(seconds)
    while not condition():
        if patience.over:
            return False
        time.sleep(every_s)
    return True


def status_within(seconds: float, process: subprocess.Popen[Any]) -> int:
    """A process's exit status, as `Popen.wait` returns it, or its TimeoutExpired."""
    if not holds_within(seconds, lambda: process.poll() is not None):
        raise subprocess.TimeoutExpired(process.args, seconds)
    return int(process.returncode)


def alive_after(seconds: float, processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended in time."""
    left = list(processes)

    def ended() -> bool:
        left[:] = psutil.wait_procs(left, timeout=0)[1]
        return not left

    holds_within(seconds, ended)
    return left
