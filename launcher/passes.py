"""Timed forward passes on all ranks: rank 0 says which, the others follow."""

from __future__ import annotations

import time

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

import megakv
from megakv.base.partition import Partition, even
from megakv.distributed.comm import Communicator

HOPELESS = 1.1
"""A partition whose first pass takes so much longer than the best is not given another."""
SEED = 20240


class TimedPasses:
    """Time to first token of partitions, measured by real prompts; of `repeats` passes the fastest counts."""

    def __init__(self, engine: megakv.MegaKVEngine, comm: Communicator, repeats: int):
        self._engine = engine
        self._comm = comm
        self._repeats = repeats
        self._ids: Tensor | None = None
        self._best = float("inf")
        self._seen: set[Partition] = set()

    def begin(self, context: int) -> None:
        """Warm up for prompts of a length. Rank 0 calls it."""
        self._best = float("inf")
        self._seen.clear()
        try:
            self._order(even(context, self._comm.mesh.cp_size))
        except ValueError as error:
            raise ValueError(f"--contexts {context}: {error}") from error

    def seconds(self, partition: Partition) -> float:
        """Time to first token with a partition of the length begun, the fastest of some passes. Rank 0 calls it.

        The first time that a partition is measured, one pass tells whether it is worth more.
        """
        found = self._order(partition)
        for _ in range(self._repeats - 1):
            if partition in self._seen or found < HOPELESS * self._best:
                found = min(found, self._order(partition))
        self._seen.add(partition)
        self._best = min(self._best, found)
        return found

    def end(self) -> None:
        """Let the other ranks go. Rank 0 calls it."""
        self._comm.gather_objects(None)

    def follow(self) -> None:
        """Compute what rank 0 orders until it ends. All other ranks call it."""
        nothing: Partition | None = None
        while (partition := self._comm.gather_objects(nothing)[0]) is not None:
            self._pass(partition)

    def _order(self, partition: Partition) -> float:
        self._comm.gather_objects(partition)
        return self._pass(partition)

    def _pass(self, partition: Partition) -> float:
        """Seconds until the slowest rank has the logits."""
        self._engine.partitions.use(partition)
        ids = self._prompt(sum(partition))
        self._comm.barrier()
        start = time.perf_counter()
        self._engine(ids, logits_to_keep=1)
        get_accelerator().synchronize()
        return max(self._comm.gather_objects(time.perf_counter() - start))

    def _prompt(self, tokens: int) -> Tensor:
        """``[1, tokens]`` some tokens, the same on all ranks."""
        if self._ids is None or self._ids.shape[1] != tokens:
            vocabulary = self._engine.module.config.get_text_config().vocab_size
            generator = torch.Generator().manual_seed(SEED)
            self._ids = torch.randint(0, vocabulary, (1, tokens), generator=generator).to(self._engine.mesh.device)
        return self._ids
