"""What an engine remembers of its last `generate`, and the report made of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megakv.cache.cache import ShardedCache
from megakv.distributed.comm import Communicator
from megakv.engine.config import MegaKVConfig
from megakv.engine.generation_call import TokenClock
from megakv.forward.choice import PrefillChoice
from megakv.tracking.machine import machine_info, peak_memory_bytes, version_info
from megakv.tracking.measurements import (
    CandidateCounts,
    HeadBalance,
    OffloadStep,
    PrefillPlan,
    ProductRates,
    Traffic,
    head_balance,
)
from megakv.tracking.report import RankReport, RunReport

if TYPE_CHECKING:
    from megakv.fairkv.mapping import HeadMapping


@dataclass
class RunRecord:
    """One `generate` call on this rank; the fields are those of the reports."""

    clock: TokenClock
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    tokens: int = 0
    kv_bytes: int = 0
    prefill: PrefillPlan | None = None
    head_tokens: list[list[int]] = field(default_factory=list)
    offload: list[OffloadStep] = field(default_factory=list)
    disk_io: str | None = None
    schedule: str | None = None
    candidates: CandidateCounts | None = None

    def finish(
        self, ids: Tensor | None, mask: Any, held: int, cache: ShardedCache, output: Any, choice: PrefillChoice | None
    ) -> None:
        """Note what came out, and how the prompt was spread; the cache held so many slots before the call."""
        chosen = None if choice is None else choice.name or choice.method
        if choice is not None and chosen is not None:
            partitions = None if choice.partitions is None else [list(parts) for parts in choice.partitions]
            self.prefill = PrefillPlan(chosen, partitions, dict(choice.predicted_s))
        sequences = output if isinstance(output, Tensor) else output.sequences
        length = 0 if ids is None else ids.shape[1]
        seen = mask if isinstance(mask, Tensor) else None if ids is None else torch.ones_like(ids)
        if seen is not None:
            self.prompt_tokens, self.cached_tokens = int(seen[:, held:].sum()), int(seen[:, :held].sum())
        self.new_tokens = (sequences.shape[1] - length) * sequences.shape[0]
        if cache.length:
            self.tokens = int(cache.table.counts()[cache.rank].sum())
            self.kv_bytes = cache.nbytes()
            self.head_tokens = cache.head_tokens()

    def _rank_report(self, comm: Communicator, weights: Mapping[str, int]) -> RankReport:
        mesh = comm.mesh
        comm.ledger.read()
        return RankReport(
            rank=mesh.rank,
            host=comm.watch.host,
            cp_rank=mesh.cp_rank,
            tp_rank=mesh.tp_rank,
            tokens=self.tokens,
            kv_bytes=self.kv_bytes,
            weight_bytes=dict(weights),
            head_tokens=self.head_tokens,
            peak_bytes=peak_memory_bytes(mesh.device),
            traffic=[
                Traffic(operation, layer, tally.calls, tally.bytes_sent, tally.seconds, tally.seconds_exposed)
                for (operation, layer), tally in comm.ledger.tallies.items()
            ],
            events=list(comm.ledger.spans),
            offload=self.offload,
            disk_io=self.disk_io,
            schedule=self.schedule,
            attention_s=comm.ledger.decode_seconds("attention"),
        )

    def run_report(
        self,
        comm: Communicator,
        config: MegaKVConfig,
        model: str,
        dtype: torch.dtype,
        mapping: HeadMapping | None = None,
        products: Sequence[ProductRates] = (),
        weights: tuple[str, Mapping[str, int]] = ("", {}),
    ) -> RunReport:
        """The report of all ranks, on every rank; `weights` are their format, and this rank's bytes by type."""
        ranks = comm.gather_objects(self._rank_report(comm, weights[1]))
        return RunReport(
            config=config.model_dump(mode="json", by_alias=True, fallback=str),
            model=model,
            dtype=str(dtype).removeprefix("torch."),
            weights=weights[0] or None,
            mesh={"cp": comm.mesh.cp_size, "tp": comm.mesh.tp_size},
            ttft_s=self.clock.ttft_s,
            ttit_s=self.clock.ttit_s,
            step_s=self.clock.step_s,
            generated_s=self.clock.times[-1] if self.clock.times else None,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            new_tokens=self.new_tokens,
            ranks=ranks,
            versions=version_info(),
            machine=machine_info(),
            prefill=self.prefill,
            balance=_balance(ranks, comm, config, mapping),
            candidates=self.candidates,
            products=list(products),
            methods={stage: dict(counts) for stage, counts in comm.ledger.methods.items()},
        )


def _balance(
    ranks: list[RankReport], comm: Communicator, config: MegaKVConfig, mapping: HeadMapping | None
) -> HeadBalance | None:
    """None where all heads hold the same tokens, and lie in runs."""
    if not all(report.head_tokens for report in ranks):
        return None
    path = str(config.megakv.fairkv.mapping)
    # An accelerator's kernels go on while the clock does.
    measured = comm.mesh.device.type == "cpu"
    return head_balance(
        [[sum(layer) for layer in report.head_tokens] for report in ranks],
        [report.attention_s if measured else [] for report in ranks],
        comm.mesh.tp_size,
        mapping=None if mapping is None else (path, mapping.digest(), mapping.barrier_utilisation),
    )
