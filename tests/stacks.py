"""Where processes that ran out of time stand: without it a start that did not go on leaves nothing to look at."""

from __future__ import annotations

import signal
from collections.abc import Sequence

import psutil

WRITE_S = 2.0
SHOWN = 20_000


def write_stacks(processes: Sequence[psutil.Process]) -> None:
    """End these; Python's write first, on standard error, what each of their threads does (PYTHONFAULTHANDLER)."""
    for process in processes:
        try:
            process.send_signal(signal.SIGABRT)
        except psutil.NoSuchProcess:
            continue
        # One after the other: they may write to one file.
        psutil.wait_procs([process], timeout=WRITE_S)


def show(stderr: str) -> None:
    """Into what pytest shows of a test that fails."""
    print(f"out of time; its last {SHOWN} characters of standard error:\n{stderr[-SHOWN:]}")
