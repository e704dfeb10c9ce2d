"""Every difference between supported versions of torch, DeepSpeed and transformers, and the reach into them."""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.comm
import psutil
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from megakv.base.errors import MegaKVError
from megakv.distributed.launchers import Launch, check_torch_variables, read_launch, slurm_address

logger = logging.getLogger(__name__)

all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
"""By its name since torch 2.13, which warns of the one before."""

SHARED_MEMORY_OP = "deepspeed_shm_comm"
LOCK_S = 15.0
"""Age from which the lock of a build that nobody works at is left over."""


def _all_on_this_host(world_size: int) -> bool:
    """Whether the op will find all ranks on this host.

    The op asks DeepSpeed's launcher the same way and, told otherwise or (under torchrun, Slurm, MPI) nothing at all,
    sets up no buffers: its first sum is a segmentation fault. Nothing but this variable predicts it.
    """
    return int(os.environ.get("LOCAL_SIZE", "0")) == world_size


def _has_compiler() -> bool:
    """Whether DeepSpeed could build the op, or find that it need not: it asks the compiler in both cases."""
    return shutil.which(os.environ.get("CXX", "c++")) is not None


def init_deepspeed_distributed(*, shared_memory: bool, timeout: timedelta) -> None:
    """Start DeepSpeed's process group, with its shared-memory all-reduce only where that is wanted and can work."""
    if deepspeed.comm.is_initialized():
        return
    launch = read_launch()
    take_device()
    wanted = shared_memory and _all_on_this_host(launch.world_size) and _has_compiler()
    if wanted:
        drop_stale_lock(SHARED_MEMORY_OP)
    # DeepSpeed builds and starts its collective whenever the process group starts on CPU, unless its table of usable
    # ops says no. It crashes on more than one host and takes most of a minute to build.
    table = importlib.import_module("deepspeed.ops").__compatible_ops__
    present = table.get(SHARED_MEMORY_OP, False)
    table[SHARED_MEMORY_OP] = present and wanted
    try:
        if not dist.is_initialized():
            _start_torch(launch, timeout)
        deepspeed.init_distributed(timeout=timeout, verbose=False, auto_mpi_discovery=launch.kind == "mpi")
    finally:
        table[SHARED_MEMORY_OP] = present
    if shared_memory and shared_memory_available():
        _unlink_shared_memory()
    # Under MPI, the local rank is known only now.
    take_device()


def _start_torch(launch: Launch, timeout: timedelta) -> None:
    """Start the world where DeepSpeed, which goes by torch's variables or asks MPI, could not."""
    if launch.kind == "torch":
        check_torch_variables()
    elif launch.kind != "mpi":
        accelerator = get_accelerator()
        options: dict[str, Any] = {"store": dist.HashStore()}
        if launch.kind == "slurm":
            options = {"init_method": f"tcp://{slurm_address()}"}
            if accelerator.device_name() == "cuda":
                # As DeepSpeed binds NCCL.
                options["device_id"] = torch.device("cuda", launch.local_rank)
        backend = accelerator.communication_backend_name()
        dist.init_process_group(backend, rank=launch.rank, world_size=launch.world_size, timeout=timeout, **options)


def take_device() -> None:
    """Compute on the device that DeepSpeed binds NCCL to, or whoever started the world: that of the local rank.

    Ranks of a host need not follow one another, nor fill it: no arithmetic on the rank in the world gives it.
    """
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return
    bound = dist.group.WORLD.bound_device_id if dist.is_initialized() and dist.group.WORLD is not None else None
    index, count = read_launch().local_rank if bound is None else bound.index, accelerator.device_count()
    if index >= count:
        raise MegaKVError(
            f"LOCAL_RANK = {index}, but this process sees {count} devices ({accelerator.visible_devices_envs()[0]}); "
            "start at most one rank for each device of a host, with all of them visible to each"
        )
    accelerator.set_device(index)


def op_folder(op: str) -> Path:
    """Where PyTorch builds an op of DeepSpeed's that was not installed with it."""
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(op, False))


def drop_stale_lock(op: str) -> Path | None:
    """Remove the lock of a killed build, on which PyTorch would wait for ever; returns the lock of one under way.

    A lock is stale when no process of this machine, as far as it can be seen, works in its folder; the first seconds,
    before a compiler runs, count as work.
    """
    lock = op_folder(op) / "lock"
    while lock.exists() and str(lock.parent) not in (process.info["cwd"] for process in psutil.process_iter(["cwd"])):
        with suppress(OSError):
            if time.time() - lock.stat().st_mtime >= LOCK_S:
                lock.unlink()
                logger.warning("removed %s, left by a build that was killed", lock)
                return None
        time.sleep(0.5)
    return lock if lock.exists() else None


def end_deepspeed_distributed() -> None:
    """End the world and all groups, and what DeepSpeed holds of them."""
    if deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()
    else:
        dist.destroy_process_group()


def store_hosts() -> list[str]:
    """Names under which this rank reaches the host of the world's store, which is rank 0's; none if it has no host."""
    store = dist.distributed_c10d._get_default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return [store.host] if isinstance(store, dist.TCPStore) else []


def _unlink_shared_memory() -> None:
    """Let the op's buffer go with its processes: DeepSpeed leaves 66 MiB per rank in /dev/shm after every run.

    All ranks must have opened it, by the name that the op made up; what is open stays usable without a name.
    """
    dist.barrier()
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    name = f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{dist.get_rank()}"
    Path("/dev/shm", name).unlink(missing_ok=True)


def shared_memory_available() -> bool:
    """Whether DeepSpeed's shared-memory all-reduce was built in this process and reaches every rank."""
    built = get_accelerator().device_name() == "cpu" and hasattr(torch.ops.deepspeed, "inference_all_reduce_")
    return built and _all_on_this_host(dist.get_world_size())


def inference_all_reduce(tensor: torch.Tensor) -> None:
    """DeepSpeed's shared-memory sum over the whole world, in place."""
    deepspeed.comm.inference_all_reduce(tensor)
