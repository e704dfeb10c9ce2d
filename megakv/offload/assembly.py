"""The offload engine of a model, put together from the JSON; what cannot fit is refused here, with the numbers."""

from __future__ import annotations

import math
import os
from contextlib import ExitStack

import torch
from transformers import PreTrainedModel

from megakv.distributed.agreement import Agreement
from megakv.injection.policy import depends_on_length
from megakv.offload.config import OffloadConfig
from megakv.offload.cuda_link import CudaStreams, StreamLink
from megakv.offload.disk import DiskTier
from megakv.offload.emulated_link import EmulatedLink
from megakv.offload.host_memory import HostTier, available_memory, check_host_budget, in_units
from megakv.offload.link import Link
from megakv.offload.methods import AUTO
from megakv.offload.pool import PagePool, Tier
from megakv.offload.profile import read_profile
from megakv.offload.runtime import Offloader
from megakv.offload.weight_stream import WeightStream
from megakv.offload.weights import HostWeights
from megakv.runtime import Runtime
from megakv.weights.placement.plan import decoder_layers

GIB = 1 << 30


def make_link(device: torch.device, emulated_bytes_s: float | None) -> Link:
    """The link of a device."""
    if device.type == "cuda":
        if emulated_bytes_s is not None:
            raise ValueError(
                "megakv.offload.emulated_link_gb_s is for machines without an accelerator; leave it out on CUDA"
            )
        return StreamLink(CudaStreams(device))
    return EmulatedLink(emulated_bytes_s)


def make_offloader(
    model: PreTrainedModel, config: OffloadConfig, runtime: Runtime, layers: int, weights: HostWeights | None = None
) -> Offloader | None:
    """The offload engine that the JSON asks for, or None, of a model with MegaKV's attention attached.

    `weights` of the decoder layers, where they are offloaded, have taken their part of the host's budget. A ValueError
    if a budget cannot be had, or the method cannot work with the model; a MegaKVError if that is so on another rank.
    """
    if not config.enabled:
        return None
    free = available_memory()
    # Nobody takes any before all have looked.
    runtime.comm.barrier()
    with ExitStack() as made:

        def build() -> Offloader:
            _check_budgets(config)
            _check_cores(config)
            held = 0 if weights is None else weights.nbytes
            check_host_budget(config.host_bytes - held, free, ranks=runtime.comm.watch.neighbours)
            return _offloader(model, config, runtime, layers, weights, made)

        # One rank without its budgets is the end for all.
        offloader = Agreement(runtime.comm).together(build)
        made.pop_all()
    return offloader


def _gigabytes(nbytes: int) -> str:
    """A budget that holds so many bytes, in GiB, rounded up."""
    size = nbytes / GIB
    unit = 10 ** (math.floor(math.log10(size)) - 2)
    return f"{math.ceil(size / unit - 1e-9) * unit:.3g}"


def _check_budgets(config: OffloadConfig) -> None:
    """Refuse a budget in which not even one page has room."""
    page = config.page_kib << 10
    for name, gigabytes in (("host_gb", config.host_gb), ("disk_gb", config.disk_gb)):
        if gigabytes and int(gigabytes * GIB) < page:
            otherwise = "" if name == "host_gb" else ", or leave it out"
            raise ValueError(
                f"megakv.offload.{name} = {gigabytes!r} is {in_units(gigabytes * GIB)}, less than one page of "
                f"megakv.offload.page_kib = {config.page_kib}; make it {_gigabytes(page)} or more, or lower "
                f"page_kib{otherwise}"
            )


def _check_cores(config: OffloadConfig) -> None:
    """Refuse more threads than there are cores: they would only wait for each other."""
    cores = len(os.sched_getaffinity(0))
    if config.cpu_threads is not None and config.cpu_threads > cores:
        raise ValueError(
            f"megakv.offload.cpu_threads = {config.cpu_threads}: this process may use {cores} cores; allowed: as many "
            "or fewer"
        )


def _check_pages(config: OffloadConfig, pool: PagePool, layers: int) -> None:
    """Refuse budgets in which not even one short sequence has room."""
    needed = layers * (2 if config.recomputes and config.method != AUTO else 1)
    if pool.capacity < needed:
        raise ValueError(
            f"{pool.budgets()}: {pool.capacity} pages of megakv.offload.page_kib = {config.page_kib}, but a sequence "
            f"needs {needed} of them at least, as every layer has its own; raise megakv.offload.host_gb to "
            f"{_gigabytes(needed * pool.page_bytes)} or more, or lower page_kib"
        )


def _offloader(
    model: PreTrainedModel,
    config: OffloadConfig,
    runtime: Runtime,
    layers: int,
    weights: HostWeights | None,
    made: ExitStack,
) -> Offloader:
    """The engine; what is `made` is closed with the stack."""
    device = runtime.comm.mesh.device
    recomputes = config.recomputes
    if recomputes and depends_on_length(model):
        if config.method != AUTO:
            raise ValueError(
                f"megakv.offload.method = {config.method!r} cannot work with model type {model.config.model_type!r}: "
                "its rotary frequencies change with the length, so keys of earlier tokens cannot be recomputed; "
                "use 'stream' or 'auto'"
            )
        recomputes = False
    # Whether its rows are these is known in the first layer of a prompt (`OffloadCosts.check`).
    read_profile(config, model.dtype, model.config.model_type)
    bandwidth = None if config.emulated_link_gb_s is None else config.emulated_link_gb_s * 1e9
    link = make_link(device, bandwidth)
    made.callback(link.close)
    held = 0 if weights is None else weights.nbytes
    memory = HostTier(config.host_bytes - held, pin=device.type == "cuda")
    made.callback(memory.close)
    link.seams = sorted([*memory.seams, *([] if weights is None else weights.seams)])
    tiers: list[Tier] = [memory]
    if config.disk_gb:
        disk = DiskTier(int(config.disk_gb * GIB), config.disk_path, io=config.disk_io)
        made.callback(disk.close)
        tiers.append(disk)
    pool = PagePool(tiers, config.page_kib << 10, layers=layers)
    _check_pages(config, pool, layers)
    stream = None
    if weights is not None:
        _, decoder = decoder_layers(model)
        stream = WeightStream(model, decoder, weights, link=link, device=device, groups=config.num_gpu_batches)
        made.callback(stream.close)
    offloader = Offloader(
        config, runtime, model, layers=layers, link=link, pool=pool, recomputes=recomputes, weights=stream
    )
    # Which closes them from now on.
    made.pop_all()
    made.callback(offloader.close)
    return offloader
