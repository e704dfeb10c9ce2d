"""Every difference between supported versions of torch, DeepSpeed and transformers, and the reach into them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import deepspeed
import deepspeed.comm
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

SHARED_MEMORY_OP = "deepspeed_shm_comm"


def _all_on_this_host(world_size: int) -> bool:
    """Whether the op will find all ranks on this host.

    The op asks DeepSpeed's launcher the same way and, told otherwise or (under torchrun, Slurm, MPI) nothing at all,
    sets up no buffers: its first sum is a segmentation fault. Nothing but this variable predicts it.
    """
    return int(os.environ.get("LOCAL_SIZE", "0")) == world_size


@contextmanager
def _shared_memory_op(wanted: bool) -> Iterator[None]:
    """Say in DeepSpeed's table of usable ops, for a moment, that its shared-memory collective is not wanted.

    DeepSpeed builds and starts it whenever the process group starts on CPU. It crashes on more than one host and takes
    most of a minute to build, so it is started only where it can serve.
    """
    table = importlib.import_module("deepspeed.ops").__compatible_ops__
    present = table.get(SHARED_MEMORY_OP, False)
    if not wanted:
        table[SHARED_MEMORY_OP] = False
    try:
        yield
    finally:
        table[SHARED_MEMORY_OP] = present


def init_deepspeed_distributed(*, shared_memory: bool, timeout: timedelta) -> None:
    """Start DeepSpeed's process group, with its shared-memory all-reduce only where that is wanted and can work."""
    if deepspeed.comm.is_initialized():
        return
    with _shared_memory_op(shared_memory and _all_on_this_host(int(os.environ.get("WORLD_SIZE", "1")))):
        deepspeed.init_distributed(timeout=timeout, verbose=False)
    if shared_memory and shared_memory_available():
        _unlink_shared_memory()
    accelerator = get_accelerator()
    if accelerator.device_name() != "cpu":
        accelerator.set_device(dist.get_rank() % max(1, accelerator.device_count()))


def extensions_folder() -> Path:
    """Where PyTorch, and with it DeepSpeed, keeps what it compiles: no public function knows of its own variable."""
    from torch.utils.cpp_extension import get_default_build_root

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())


def end_deepspeed_distributed() -> None:
    """End the world and all groups, and what DeepSpeed holds of them."""
    if deepspeed.comm.is_initialized():
        deepspeed.comm.destroy_process_group()
    else:
        dist.destroy_process_group()


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
