"""The device that computes, as the host sees it: what it is given, and whose memory is pinned."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


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
