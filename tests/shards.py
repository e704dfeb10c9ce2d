"""Tensor-parallel ranks as threads of one process, summing through memory."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megakv.engine.loading import LoadedModel, build_model


class ThreadSum:
    """An all-reduce among threads, adding in the order of ranks as a test can repeat."""

    def __init__(self, size: int):
        self._barrier = threading.Barrier(size)
        self._parts: list[Tensor] = [torch.empty(0)] * size

    def of(self, rank: int) -> Callable[[Tensor], Tensor]:
        """The all-reduce as `rank` calls it."""

        def all_reduce(tensor: Tensor) -> Tensor:
            self._parts[rank] = tensor
            self._barrier.wait(30)
            total = torch.stack(self._parts).sum(0)
            self._barrier.wait(30)
            return total

        return all_reduce

    def abort(self) -> None:
        """Let no thread wait for one that failed."""
        self._barrier.abort()


class ThreadRanks:
    """A model loaded once for every tensor-parallel rank.

    Parameters
    ----------
    source : directory, or a callable giving each rank a module of its own
    size : int
    **options
        For `build_model`.
    """

    def __init__(self, source: Path | Callable[[], Any], size: int, **options: Any):
        self._sum = ThreadSum(size)
        options.setdefault("dtype", torch.float32)
        self.ranks: list[LoadedModel] = [
            build_model(
                source() if callable(source) else source,
                tp_rank=rank,
                tp_size=size,
                all_reduce=self._sum.of(rank),
                **options,
            )
            for rank in range(size)
        ]

    def logits(self, input_ids: Tensor) -> list[Tensor]:
        """``[B, S, V]`` from every rank."""
        return self.each(lambda module: module(input_ids, use_cache=False).logits)

    def each(self, call: Callable[[Any], Tensor]) -> list[Tensor]:
        """What a call gives for every rank's module; the first error of any rank is raised."""
        found: dict[int, Tensor] = {}
        errors: list[Exception] = []

        def forward(rank: int) -> None:
            try:
                with torch.no_grad():
                    found[rank] = call(self.ranks[rank].module)
            except Exception as error:
                errors.append(error)
                self._sum.abort()

        threads = [threading.Thread(target=forward, args=(rank,)) for rank in range(len(self.ranks))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return [found[rank] for rank in range(len(self.ranks))]
