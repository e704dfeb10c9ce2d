"""The ranks of a running benchmark: joined, in step, and with as many threads as asked."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from megakv.distributed.mesh import start_distributed, stop_distributed

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """All ranks of a benchmark, as one of them sees them."""

    rank: int
    size: int
    device: torch.device  # Where this rank computes

    def barrier(self) -> None:
        dist.barrier()

    def gather(self, value: T) -> list[T]:
        """One small object of every rank, on every rank."""
        values: list[T | None] = [None] * self.size
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]

    def leave(self) -> None:
        """End together, so that no rank takes an early end of another for a failure."""
        self.barrier()
        stop_distributed()


def join_world(threads: int, *, shared_memory: bool, timeout_s: float) -> World:
    """Join the other ranks."""
    torch.set_num_threads(threads)
    start_distributed(tp_only=shared_memory, timeout_s=timeout_s)
    return World(dist.get_rank(), dist.get_world_size(), torch.device(get_accelerator().current_device_name()))


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A world of this process alone, without a launcher."""
    # NCCL is only there for tensors on a GPU.
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()
