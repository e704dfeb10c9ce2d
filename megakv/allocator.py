"""The C library's allocator in the state of a process that serves: measured times depend on it."""

from __future__ import annotations

import torch

LARGEST_REUSED_BYTES = (32 << 20) - (64 << 10)
"""Just below the largest block that glibc ever keeps for reuse on 64-bit machines."""


def settle_allocator() -> None:
    """Let freed blocks of up to 32 MiB be used again, as they are once a process has freed one of that size.

    glibc hands a larger block than any freed so far back to the system, and the top of its heap with it when twice that
    much is free; the next call pays for every page anew. Of 130 ms of a layer of pass-Q at 4,096 tokens, its return
    then took 23 and not 9. Other allocators are indifferent to it.
    """
    torch.empty(LARGEST_REUSED_BYTES, dtype=torch.uint8)
