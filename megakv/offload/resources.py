"""What the JSON's budgets and link are on this machine: tiers of memory, and the way to the accelerator."""

from __future__ import annotations

from contextlib import ExitStack

import torch

from megakv.base.laws import CombinationError
from megakv.offload.config import OffloadConfig
from megakv.offload.cuda_link import CudaStreams, StreamLink
from megakv.offload.disk import DiskTier
from megakv.offload.host_memory import HostTier
from megakv.offload.link import EmulatedLink, Link
from megakv.offload.weights import LayerWeights


def make_link(device: torch.device, emulated_gb_s: float | None) -> Link:
    """The link of a device."""
    if device.type != "cuda":
        return EmulatedLink(None if emulated_gb_s is None else emulated_gb_s * 1e9)
    if emulated_gb_s is not None:
        raise CombinationError(
            "machine", "megakv.offload.emulated_link_gb_s is for machines without an accelerator; leave it out on CUDA"
        )
    return StreamLink(CudaStreams(device))


def made_tiers(
    config: OffloadConfig, weights: LayerWeights | None, *, pin: bool, made: ExitStack
) -> tuple[HostTier, list[DiskTier]]:
    """Host memory and, where its budget holds a page, a file, without what weights have taken; `made` ends them."""
    held, disk = (0, None) if weights is None else (weights.host_bytes, weights.disk)
    memory = HostTier(config.host_bytes - held, pin=pin, unit=config.page_kib << 10)
    made.callback(memory.close)
    left = config.disk_bytes - (0 if disk is None else disk.budget)
    files = [DiskTier(left, config.disk_path, io=config.disk_io)] if left >= config.page_kib << 10 else []
    for file in files:
        made.callback(file.close)
    return memory, files
