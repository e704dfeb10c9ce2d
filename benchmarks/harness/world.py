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
from torch import Tensor

from megakv.distributed.mesh import start_distributed, stop_distributed
from megakv.errors import MegaKVError

TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 1e-2}
"""How far the logits of two methods may lie apart, relative to the largest logit."""
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
    device = torch.device(get_accelerator().current_device_name())
    return World(dist.get_rank(), dist.get_world_size(), device)


class Agreement:
    """Methods are only compared if they compute the same: the first one's logits are what the others must equal."""

    def __init__(self, world: World, dtype: str):
        self._world = world
        self._tolerance = TOLERANCE[dtype]
        self._first: tuple[str, Tensor] | None = None

    def check(self, name: str, logits: Tensor | None) -> float:
        """The largest difference over all ranks, relative to the largest logit; None from a rank that took no part."""
        if self._first is None:
            assert logits is not None
            self._first = name, logits.float()
        first, expected = self._first
        own = 0.0 if logits is None else float((logits.float() - expected).abs().max() / expected.abs().max())
        difference = max(self._world.gather(own))
        if not difference <= self._tolerance:
            raise MegaKVError(f"{name}: logits differ from those of {first} by {difference:.1e} of the largest")
        return difference


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
