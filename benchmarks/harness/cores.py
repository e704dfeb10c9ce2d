"""Cores that the emulated accelerator and its host run on.

Two cores of a virtual machine may be one physical core: where the system puts the thread that computes and the one that
attends then decides about tenths of a step's time, for a whole generation.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

HOST, LINK = "host-rank", "link-"
"""What names of threads begin with."""


@contextmanager
def threads_on(cores: Sequence[int] | None) -> Iterator[None]:
    """Keep this thread on the first core, threads that attend on the second, and those of links on all others."""
    if cores is None:
        yield
        return
    everywhere = os.sched_getaffinity(0)
    for thread in threading.enumerate():
        if thread.native_id is not None and thread.name.startswith((HOST, LINK)):
            places = {cores[1]} if thread.name.startswith(HOST) else everywhere - set(cores)
            os.sched_setaffinity(thread.native_id, places)
    os.sched_setaffinity(0, {cores[0]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, everywhere)
