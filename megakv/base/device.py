"""What torch does with the device that computes: what it is given, how far it has come, in which mode of autograd."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")

LARGEST_REUSED_BYTES = (32 << 20) - (64 << 10)
"""Just below the largest block that glibc ever keeps for reuse on 64-bit machines."""


def without_autograd(function: Callable[P, T]) -> Callable[P, T]:
    """Run a function without gradients, and outside of inference mode.

    Caches, buffers and tables outlive the call that makes them. Those made in inference mode could not be written to
    outside of it, so that one call of a user who is in it would break all later ones of users who are not.
    """

    @functools.wraps(function)
    def entered(*args: P.args, **kwargs: P.kwargs) -> T:
        # In this order: leaving inference mode turns gradients on.
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return entered


def upload(values: NDArray[Any], device: torch.device) -> Tensor:
    """A tensor on a device; the host goes on at once.

    Out of pinned memory, which torch gives to nobody else before the copy is over: from any other, the host would wait
    for all that the device has to do before it.
    """
    tensor = pinned(values, device)
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)


def pinned(values: NDArray[Any], device: torch.device) -> Tensor:
    """A tensor of the host, from which a device is copied to with ``non_blocking``."""
    tensor = torch.from_numpy(values)
    return tensor if device.type == "cpu" else tensor.pin_memory()


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Whatever thread calls: a new one is on the first device, where what it pins would take a context of its own."""
    return nullcontext() if device.type == "cpu" else torch.get_device_module(device).device(device)


def random_state(device: torch.device) -> list[Tensor]:
    """Random state that sampling draws from: of the host, and of an accelerator if the device is one."""
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device).get_rng_state(device)]


def set_random_state(states: Sequence[Tensor], device: torch.device) -> None:
    """Go on from a `random_state` of a device of the same type."""
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)


def settle_allocator() -> None:
    """Let freed blocks of up to 32 MiB be used again, as they are once a process has freed one of that size.

    glibc hands a larger block than any freed so far back to the system, and the top of its heap with it when twice that
    much is free; the next call pays for every page anew. Of 130 ms of a layer of pass-Q at 4,096 tokens, its return
    then took 23 and not 9. Other allocators are indifferent to it.
    """
    torch.empty(LARGEST_REUSED_BYTES, dtype=torch.uint8)


class Clock(Protocol):
    """Moments of one device, and the seconds between them.

    A processor that computes as it is told is at every moment where the thread is that tells it. An accelerator is not:
    a moment is put into its queue of work, and known once it has come to it. Nobody waits for that.
    """

    def mark(self) -> Any:
        """The moment at which the device comes to what this thread has it do next."""

    def passed(self, mark: Any) -> bool:
        """Whether it has come there; then it has come to all earlier ones of this thread, too."""

    def seconds(self, first: Any, last: Any) -> float:
        """From one moment to another, once both have passed."""


class HostClock:
    """Where the processor itself is the device that computes."""

    def mark(self) -> float:
        return time.perf_counter()

    def passed(self, mark: float) -> bool:
        return True

    def seconds(self, first: float, last: float) -> float:
        return last - first
