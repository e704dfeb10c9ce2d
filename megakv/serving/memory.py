"""How many tokens' keys and values there is memory for, and how much memory ranks use."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch
from deepspeed.accelerator import get_accelerator

from megakv.distributed.comm import Communicator
from megakv.errors import MegaKVError
from megakv.offload.host_memory import available_memory

SHARE = 0.5
"""Part of the free memory that keys and values may take, where nothing else is said."""


@dataclass(frozen=True)
class KVMemory:
    """Space for so many `tokens`; each takes `token_bytes`, over all ranks."""

    tokens: int
    token_bytes: int

    def on_disk(self, gigabytes: float) -> int:
        """Tokens for which a store of that size has space."""
        return int(gigabytes * 1e9) // max(1, self.token_bytes)


def measured_memory(comm: Communicator, nbytes: float, tokens: int | None, room: int | None) -> KVMemory:
    """For so many `tokens`, or as many as half of every rank's free memory holds, where a token takes so much on this
    rank; or for as many as all have `room` for in tiers. Collective.
    """
    device = comm.mesh.device
    if device.type == "cpu":
        free = (available_memory() or psutil.virtual_memory().available) // comm.watch.neighbours
    else:
        free = int(get_accelerator().available_memory(device.index))
    ranks = comm.gather_objects((nbytes, int(SHARE * free / max(1.0, nbytes)) if room is None else room))
    fits = min(fits for _, fits in ranks)
    if tokens is None and fits < 1:
        raise MegaKVError(
            "no memory is left for keys and values: set kv_tokens, or free some"
            if room is None
            else "megakv.offload.host_gb has too few pages for max_sequences, each of which needs some of its own: "
            "raise it, or lower megakv.offload.page_kib or max_sequences"
        )
    return KVMemory(fits if tokens is None else tokens, round(sum(each for each, _ in ranks)))


def memory_in_use(device: torch.device) -> int:
    """Bytes of this rank's device, or of its process where that is the processor."""
    if device.type != "cpu":
        return int(get_accelerator().memory_allocated(device.index))
    return int(psutil.Process().memory_info().rss)
