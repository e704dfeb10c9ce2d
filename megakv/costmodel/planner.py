"""What the cost model says about a pass before its layers run: partitions, and seconds by prefill method.

It speaks for one rank: hosts of different make may round differently, so rank 0's answers are everybody's
(`PassPlanner`). They are kept by workload, lengths rounded to a few per cent: a prompt of any length is planned in no
time once one like it has been.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from deepspeed.accelerator import get_accelerator

from megakv.attention.runahead import CHUNK_TOKENS
from megakv.costmodel.chain_search import best_partition
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.memory import token_bytes
from megakv.costmodel.prefill import PrefillTimes
from megakv.costmodel.shape import ModelShape
from megakv.distributed.comm import Communicator
from megakv.runahead.partition import Partition, from_fractions

K = TypeVar("K")
T = TypeVar("T")

SIGNIFICANT_BITS = 5
KEPT = 4096
CANDIDATES = ("single", "runahead", "pass_kv", "pass_q")
MEMORY_SHARE = 0.5
"""How much of the free memory one rank may take for a whole prompt."""


def rounded(count: int) -> int:
    """The nearest number with few significant bits: at most 3% away."""
    step = 1 << max(0, count.bit_length() - SIGNIFICANT_BITS)
    return (count + step // 2) // step * step


@dataclass
class PrefillPlanner:
    """Predictions for one engine."""

    profile: HardwareProfile
    model: ModelShape
    size: int  # Context-parallel degree.
    tp_size: int = 1
    kv: str = "sharded"  # As ``megakv.runahead.kv``.
    chunk_tokens: int = CHUNK_TOKENS  # As ``megakv.runahead.chunk_tokens``.
    alone_tokens: int = 0  # Tokens of a whole prompt that one rank may take.
    _partitions: dict[tuple[int, int], Partition] = field(default_factory=dict)
    _seconds: dict[Workload, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def on(
        cls, comm: Communicator, profile: HardwareProfile, model: ModelShape, *, kv: str, chunk_tokens: int
    ) -> PrefillPlanner:
        """That of an engine whose weights are loaded. Every rank must call it."""
        mesh = comm.mesh
        free = min(comm.gather_objects(int(get_accelerator().available_memory())))
        room = int(MEMORY_SHARE * free) // token_bytes(model, tp_size=mesh.tp_size)
        return cls(
            profile,
            model,
            mesh.cp_size,
            tp_size=mesh.tp_size,
            kv=kv,
            chunk_tokens=chunk_tokens,
            alone_tokens=room,
        )

    def partition(self, new: int, cached: int = 0) -> Partition:
        """The fastest partition of a sequence, as far as the cost model knows."""
        known = rounded(new), rounded(cached)

        def search() -> Partition:
            return best_partition(
                self.profile,
                self.model,
                known[0],
                self.size,
                cached=known[1],
                tp_size=self.tp_size,
                kv=self.kv,
                chunk_tokens=self.chunk_tokens,
            )

        partition = self._kept(self._partitions, known, search)
        return from_fractions(partition, new)

    def seconds(self, workload: Workload, sizes: Callable[[int, int], Sequence[int]]) -> dict[str, float]:
        """TTFT of a pass by every method that may serve it.

        sizes: the partition of so many new tokens behind so many cached ones that runahead would use.
        """
        similar = Workload(tuple(map(rounded, workload.new)), tuple(map(rounded, workload.cached)), workload.size)

        def predict() -> dict[str, float]:
            times = PrefillTimes(
                self.profile,
                self.model,
                similar,
                tp_size=self.tp_size,
                kv=self.kv,
                chunk_tokens=self.chunk_tokens,
            )
            alone = workload.total == workload.total_new <= self.alone_tokens
            names = [name for name in CANDIDATES if alone or name != "single"]
            return {name: times.seconds(name, partitions) for name in names}

        if similar in self._seconds:
            return self._seconds[similar]
        partitions = tuple(
            from_fractions(sizes(*given), new) if new else (0,) * self.size
            for given, new in zip(zip(workload.new, workload.cached, strict=True), similar.new, strict=True)
        )
        return self._kept(self._seconds, similar, predict)

    def _kept(self, store: dict[K, T], key: K, compute: Callable[[], T]) -> T:
        if key not in store:
            if len(store) >= KEPT:
                store.clear()
            store[key] = compute()
        return store[key]
