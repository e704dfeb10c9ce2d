"""The device that computes, as the host sees it: what it is given, whose memory is pinned, how the host allocates."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

LARGEST_REUSED_BYTES = (32 << 20) - (64 << 10)
"""Just below the largest block that glibc ever keeps for reuse on 64-bit machines."""


def upload(values: NDArray[Any], device: torch.device) -> Tensor:
    """A tensor on a device; the host goes on at once.

    Out of pinned memory, which torch gives to nobody else before the copy is over: from any other, the host would wait
    for all that the device has to do before it.
    """
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Whatever thread calls: a new one is on the first device, where what it pins would take a context of its own."""
    return nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)


def settle_allocator() -> None:
    """Let freed blocks of up to 32 MiB be used again, as they are once a process has freed one of that size.

    glibc hands a larger block than any freed so far back to the system, and the top of its heap with it when twice that
    much is free; the next call pays for every page anew. Of 130 ms of a layer of pass-Q at 4,096 tokens, its return
    then took 23 and not 9. Other allocators are indifferent to it.
    """
    torch.empty(LARGEST_REUSED_BYTES, dtype=torch.uint8)
