"""The random state that sampling draws from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def random_state(device: torch.device) -> list[Tensor]:
    """That of the host, and of an accelerator if it is one."""
    states = [torch.get_rng_state()]
    return states if device.type == "cpu" else [*states, torch.get_device_module(device).get_rng_state(device)]


def set_random_state(states: Sequence[Tensor], device: torch.device) -> None:
    """Go on from a `random_state` of a device of the same type."""
    torch.set_rng_state(states[0])
    if device.type != "cpu":
        torch.get_device_module(device).set_rng_state(states[1], device)
