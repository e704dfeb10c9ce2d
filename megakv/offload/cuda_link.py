"""The link of a CUDA device: what `stream_link.py` needs of `torch.cuda`."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megakv.offload.clock import Clock, HostClock
from megakv.offload.stream_link import StreamClock, StreamLink
from megakv.offload.tiers import in_units

logger = logging.getLogger(__name__)


class CudaStreams:
    """Streams and events of a CUDA device.

    Parameters
    ----------
    device : torch.device
    """

    def __init__(self, device: torch.device):
        self._device = device

    def stream(self) -> Any:
        return torch.cuda.Stream(self._device)

    def current(self) -> Any:
        return torch.cuda.current_stream(self._device)

    def event(self, stream: Any, *, timed: bool) -> Any:
        event = torch.cuda.Event(enable_timing=timed)
        event.record(stream)
        return event

    def copy(self, stream: Any, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        with torch.cuda.stream(stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                # Memory that is given back meanwhile goes to nobody else before the copy is over.
                (target if target.is_cuda else source).record_stream(stream)

    def enter_thread(self) -> None:
        # A new thread is on the first device, where memory that it pins would take a context of its own.
        torch.cuda.set_device(self._device)

    def bounce(self, nbytes: int) -> Tensor:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            logger.warning(
                "pinning host memory failed for %s that rows of files pass through (%s): copies are slow, not "
                "beside computation; a higher limit of locked memory (ulimit -l) avoids that",
                in_units(nbytes),
                str(error).partition("\n")[0],
            )
            return torch.empty(nbytes, dtype=torch.uint8)


def clock_of(device: torch.device) -> Clock:
    """Moments of what a device computes."""
    return StreamClock(CudaStreams(device)) if device.type == "cuda" else HostClock()


class CudaLink(StreamLink):
    """The link of a CUDA device: page-locked memory is copied beside computation.

    Parameters
    ----------
    device : torch.device
    """

    def __init__(self, device: torch.device):
        super().__init__(CudaStreams(device))
