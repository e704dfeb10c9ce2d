"""What the cost model says about a pass before its layers run: partitions, and seconds by prefill method.

It speaks for one rank: hosts of different make may round differently, so rank 0's answers are everybody's
(`PassPlanner`). They are kept by workload, lengths rounded to a few per cent: a prompt of any length is planned in no
time once one like it has been.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed.accelerator import get_accelerator

from megakv.attention.runahead import CHUNK_TOKENS
from megakv.base.partition import Partition, from_fractions
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.hardware import HardwareProfile
from megakv.costmodel.memory import token_bytes
from megakv.costmodel.prefill import PrefillTimes
from megakv.costmodel.shape import ModelShape
from megakv.distributed.comm import Communicator
from megakv.runahead.chain_search import best_partition

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
        return cls(profile, model, mesh.cp_size, mesh.tp_size, kv, chunk_tokens, alone_tokens=room)

    @property
    def _options(self) -> dict[str, Any]:
        return {"tp_size": self.tp_size, "kv": self.kv, "chunk_tokens": self.chunk_tokens}

    def partition(self, new: int, cached: int = 0) -> Partition:
        tokens, held = rounded(new), rounded(cached)
        if (tokens, held) not in self._partitions:
            _make_room(self._partitions)
            found = best_partition(self.profile, self.model, tokens, self.size, cached=held, **self._options)
            self._partitions[tokens, held] = found
        return from_fractions(self._partitions[tokens, held], new)

    def seconds(self, workload: Workload, sizes: Callable[[int, int], Sequence[int]]) -> dict[str, float]:
        """TTFT of a pass by every method that may serve it; `sizes` is the partition of new behind cached tokens."""
        similar = Workload(tuple(map(rounded, workload.new)), tuple(map(rounded, workload.cached)), workload.size)
        if similar not in self._seconds:
            partitions = tuple(
                from_fractions(sizes(*given), new) if new else (0,) * self.size
                for given, new in zip(zip(workload.new, workload.cached, strict=True), similar.new, strict=True)
            )
            times = PrefillTimes(self.profile, self.model, similar, **self._options)
            alone = workload.total == workload.total_new <= self.alone_tokens
            names = [name for name in CANDIDATES if alone or name != "single"]
            _make_room(self._seconds)
            self._seconds[similar] = {name: times.seconds(name, partitions) for name in names}
        return self._seconds[similar]


def _make_room(kept: dict[Any, Any]) -> None:
    if len(kept) >= KEPT:
        kept.clear()
