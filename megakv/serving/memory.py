"""How many tokens' keys and values there is memory for, and how much memory ranks use."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch
from deepspeed.accelerator import get_accelerator

from megakv.base.errors import MegaKVError
from megakv.distributed.comm import Communicator
from megakv.offload.host_memory import available_memory

SHARE = 0.5
"""Part of the free memory that keys and values may take, where nothing else is said."""


@dataclass(frozen=True)
class KVMemory:
    """Space for so many `tokens`; each takes `token_bytes`, over all ranks.

    Where what is kept of caches does not lie in their memory, there is space for so many `copies` beside them.
    """

    tokens: int
    token_bytes: int
    copies: int | None = None

    def on_disk(self, gigabytes: float) -> int:
        """Tokens for which a store of that size has space."""
        return int(gigabytes * 1e9) // max(1, self.token_bytes)


def measured_memory(comm: Communicator, nbytes: float, tokens: int | None, room: int | None) -> KVMemory:
    """For so many `tokens`, or as many as half of every rank's free memory holds, where a token takes so much on this
    rank; or for as many as all have `room` for in tiers, and copies of no more in that memory. Collective.

    A ValueError where so many `tokens` have no room there.
    """
    device = comm.mesh.device
    if device.type == "cpu" or room is not None:
        free = (available_memory() or psutil.virtual_memory().available) // comm.watch.neighbours
    else:
        free = int(get_accelerator().available_memory(device.index))
    ranks = comm.gather_objects((nbytes, int(SHARE * free / max(1.0, nbytes)), room))
    fits, token_bytes = min(fits for _, fits, _ in ranks), round(sum(each for each, _, _ in ranks))
    if rooms := [own for _, _, own in ranks if own is not None]:
        wanted = min(rooms) if tokens is None else tokens
        if not 0 < wanted <= min(rooms):
            raise ValueError(
                f"megakv.offload.host_gb and disk_gb have room for {min(rooms)} tokens of max_sequences, each of which "
                f"takes pages of its own, and kv_tokens = {tokens or 'as many as fit'}: raise them, or lower "
                "kv_tokens, max_sequences or megakv.offload.page_kib"
            )
        return KVMemory(wanted, token_bytes, min(fits, wanted))
    if tokens is None and fits < 1:
        raise MegaKVError("no memory is left for keys and values: set kv_tokens, or free some")
    return KVMemory(fits if tokens is None else tokens, token_bytes)


def memory_in_use(device: torch.device) -> int:
    """Bytes of this rank's device, or of its process where that is the processor."""
    if device.type != "cpu":
        return int(get_accelerator().memory_allocated(device.index))
    return int(psutil.Process().memory_info().rss)
