"""The profiler: what the link and recomputation take on this machine, measured once and kept up to date."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from pydantic import Field

from megakv.costmodel.hardware import Fingerprint
from megakv.costmodel.offload import LayerCosts, shared_attend_seconds
from megakv.costmodel.offload_pipeline import WeightTimes, group_times, step_seconds
from megakv.costmodel.records import Record, load_record
from megakv.offload.config import OffloadConfig
from megakv.offload.host_rank import HostRank, Queries
from megakv.offload.link import Link
from megakv.offload.pages import PagedRows, unwritten
from megakv.offload.pool import PagePool
from megakv.offload.record import StepRecord
from megakv.offload.scheduler import Division

if TYPE_CHECKING:
    from megakv.injection.recomputation import Recomputation
    from megakv.offload.store import TieredStore

REPEATS = 5
PROBE_BYTES = 16 << 20
"""Rows that are sent to measure the link, at most."""
PROBE_ROWS = 16
"""At least."""
PROBE_S = 0.05
"""An emulated link is measured with what it sends in that time."""
PROBE_TOKENS = 512
LEARNING = 0.3
"""Weight of the latest step in what is learned while tokens are generated."""
STEADY = 3
"""Steps after which learned times count: the first ones fill caches and pipelines."""


class OffloadProfile(Record):
    """Measured speeds of one machine for one model.

    Parameters
    ----------
    fingerprint : Fingerprint
    row_bytes, input_bytes : int
        Of a token's keys and values in one layer, and of its activations.
    link_bytes_s, transfer_s : float
        Bandwidth to the accelerator, and what a transfer costs whatever its size.
    recompute_s, launch_s : float
        Recomputing a token in one layer, and what each recomputation costs.
    host_attend_s, host_fixed_s : float
        Attending to a token of one layer on the host, and what doing so costs for each sequence.
    emulated_link_gb_s : float, optional
        Where the link is emulated, at what bandwidth.
    """

    format: Literal["megakv offload profile"] = "megakv offload profile"
    fingerprint: Fingerprint
    row_bytes: int = Field(gt=0)
    input_bytes: int = Field(ge=0)
    link_bytes_s: float = Field(gt=0)
    transfer_s: float = Field(ge=0)
    recompute_s: float = Field(ge=0)
    launch_s: float = Field(ge=0)
    host_attend_s: float = Field(ge=0)
    host_fixed_s: float = Field(ge=0)
    emulated_link_gb_s: float | None = None


class HostTrial(NamedTuple):
    """What the host's attention is measured with."""

    rank: HostRank
    queries: Queries


class OffloadCosts:
    """Costs of a layer of an engine's model, from a profile and from what steps show.

    Parameters
    ----------
    config : OffloadConfig
    link : Link
    pool : PagePool
        Whose unused pages the link and the host are measured with.
    device : torch.device
    sharers : int
        Ranks on this host: they share the bandwidth of its memory when they attend there.
    """

    def __init__(self, config: OffloadConfig, link: Link, pool: PagePool, device: torch.device, *, sharers: int = 1):
        self._config = config
        self._link = link
        self._pool = pool
        self._sharers = sharers
        self._device = device
        self.profile: OffloadProfile | None = None
        self.outside_s = 0.0
        self._device_s = 0.0
        self._steps = 0

    def layer(self, store: TieredStore, recomputation: Recomputation | None, host: HostTrial | None) -> LayerCosts:
        """Costs of a layer that holds cached tokens; the first call measures, or reads the profile.

        Raises
        ------
        ValueError
            If the profile is of another machine or model.
        """
        if self.profile is None:
            self.profile = self._load(store) or self._measure(store, recomputation, host)
        profile = self.profile
        return LayerCosts(
            kv_s=profile.row_bytes / profile.link_bytes_s,
            activation_s=profile.input_bytes / profile.link_bytes_s,
            recompute_s=profile.recompute_s,
            transfer_s=profile.transfer_s,
            launch_s=profile.launch_s,
            host_attend_s=shared_attend_seconds(profile.host_attend_s, self._sharers),
            host_fixed_s=profile.host_fixed_s * len(store.lengths()),
            device_s=self._device_s,
        )

    def predict(
        self, costs: LayerCosts, divisions: Sequence[Division], layers: int, weights: WeightTimes, *, chunk: int
    ) -> float:
        """Seconds from step to step, of a division for each group; `costs` are of one group, `chunk` is in tokens."""
        groups = [
            group_times(costs, each.recomputed, each.on_host, each.streamed, chunk=chunk, outside_s=self.outside_s)
            for each in divisions
        ]
        return step_seconds(groups, layers, weights)

    def sending_s(self, nbytes: float) -> float:
        """Seconds of the link for so many bytes; the first call of `layer` comes before."""
        assert self.profile is not None
        return nbytes / self.profile.link_bytes_s

    @property
    def settled(self) -> bool:
        """Whether what steps show has come in, where it does."""
        return self._device.type != "cpu" or self._steps > STEADY

    def learn(self, record: StepRecord, layers: int) -> None:
        """Take in what a step showed. Only a processor that computes as it is told can be timed this way."""
        assert self.profile is not None
        if self._device.type != "cpu" or not record.usual:
            return
        self._steps += 1
        weight = LEARNING if self._steps > STEADY else 1.0
        busy = max(0.0, record.elapsed_s - record.waited_s - record.recompute_s - record.peers_s) / layers
        self._device_s += weight * (busy - self._device_s)
        self.outside_s += weight * (record.gap_s - self.outside_s)
        changes: dict[str, float] = {}
        if record.division.recomputed and record.recompute_s:
            shown = record.recompute_s / (layers * record.division.recomputed)
            known = self.profile.recompute_s + self.profile.launch_s / record.division.recomputed
            changes["recompute_s"] = self.profile.recompute_s * (1 + weight * (shown / known - 1))
        if record.division.on_host and record.host_s:
            fixed = self.profile.host_fixed_s * record.new / record.division.on_host
            shown = record.host_s / (layers * record.division.on_host)
            known = shared_attend_seconds(self.profile.host_attend_s, self._sharers) + fixed
            changes["host_attend_s"] = self.profile.host_attend_s * (1 + weight * (shown / known - 1))
        if record.bytes_in and record.busy_s:
            shown = record.bytes_in / record.busy_s
            changes["link_bytes_s"] = self.profile.link_bytes_s + weight * (shown - self.profile.link_bytes_s)
        self.profile = self.profile.model_copy(update=changes)

    # Measuring

    def _load(self, store: TieredStore) -> OffloadProfile | None:
        path = self._config.profile
        if path is None or not Path(path).exists():
            return None
        setting = "megakv.offload.profile"
        remedy = "remove it, and it is measured anew"
        profile = load_record(OffloadProfile, path, setting=setting, remedy=remedy)
        differences = profile.fingerprint.differences(self._fingerprint(store))
        mine = (store.row_bytes, store.input_bytes, self._config.emulated_link_gb_s)
        if mine != (profile.row_bytes, profile.input_bytes, profile.emulated_link_gb_s):
            differences.append("another model's rows, or another emulated link")
        if differences:
            raise ValueError(f"{setting} = {path!r} was measured elsewhere ({'; '.join(differences)}); {remedy}")
        return profile

    def _fingerprint(self, store: TieredStore) -> Fingerprint:
        return Fingerprint.of_this_process(hosts=1, ranks=1, dtype=store.dtype)

    def _measure(
        self, store: TieredStore, recomputation: Recomputation | None, host: HostTrial | None
    ) -> OffloadProfile:
        emulated = self._config.emulated_link_gb_s
        most = PROBE_BYTES if emulated is None else min(PROBE_BYTES, int(PROBE_S * emulated * 1e9))
        few, many = self._sent(store, 1), self._sent(store, max(most, PROBE_ROWS * store.row_bytes))
        slope = max(many[1] - few[1], 1e-9) / max(many[0] - few[0], 1)
        profile = OffloadProfile(
            fingerprint=self._fingerprint(store),
            row_bytes=store.row_bytes,
            input_bytes=store.input_bytes,
            link_bytes_s=1 / slope,
            transfer_s=max(0.0, few[1] - few[0] * slope),
            recompute_s=0.0,
            launch_s=0.0,
            host_attend_s=0.0,
            host_fixed_s=0.0,
            emulated_link_gb_s=emulated,
        )
        if recomputation is not None and store.input_bytes:
            recompute_s, launch_s = self._recomputed(store, recomputation)
            profile = profile.model_copy(update={"recompute_s": recompute_s, "launch_s": launch_s})
        if host is not None:
            host_attend_s, host_fixed_s = self._attended(store, host)
            profile = profile.model_copy(update={"host_attend_s": host_attend_s, "host_fixed_s": host_fixed_s})
        if self._config.profile is not None:
            profile.save(self._config.profile)
        return profile

    def _sent(self, store: TieredStore, nbytes: int) -> tuple[int, float]:
        """Bytes and seconds of sending rows of the store's width, out of pages that nobody uses."""
        count = max(1, nbytes // store.row_bytes)
        rows = self._probe(store, count)
        if rows is None:
            # The budgets are full: rows that are there must do.
            lengths = store.lengths()
            sequence = max(range(len(lengths)), key=lambda index: lengths[index])
            count = min(count, lengths[sequence])
        target = torch.empty((count, store.stored_width), dtype=store.stored_dtype, device=self._device)
        moves, pages = store.row_moves(sequence, 0, target) if rows is None else rows.moves(0, target)
        for ticket in unwritten(pages):
            ticket.settle()
        return count * store.row_bytes, self._timed(lambda: self._link.start("in", moves).settle())

    def _probe(self, store: TieredStore, count: int) -> PagedRows | None:
        """Rows like a store's in pages that nobody uses; None where there are too few."""
        rows = PagedRows(self._pool, store.stored_width, store.stored_dtype)
        if not self._pool.has_room(rows.bytes_for(count)):
            return None
        rows.extend(count)
        return rows

    def _recomputed(self, store: TieredStore, recomputation: Recomputation) -> tuple[float, float]:
        """Seconds per token, and of a call whatever its tokens."""
        times = []
        for count in (PROBE_TOKENS // 8, PROBE_TOKENS):
            # No random numbers: the state that sampling draws from is the user's.
            inputs = torch.linspace(-1, 1, count * store.input_width, device=self._device)
            inputs = inputs.view(count, -1).to(store.dtype)
            positions = torch.zeros(count, dtype=torch.int64).numpy()

            def call(inputs: torch.Tensor = inputs, positions: object = positions) -> object:
                return recomputation.recompute(store.layer, inputs, positions)  # type: ignore[arg-type]

            times.append((count, self._timed(call)))
        (few, few_s), (many, many_s) = times
        slope = max(many_s - few_s, 0.0) / (many - few)
        return slope, max(0.0, few_s - few * slope)

    def _attended(self, store: TieredStore, host: HostTrial) -> tuple[float, float]:
        """Seconds per token of the host's attention, and of a sequence whatever its tokens."""
        rows, many = self._probe(store, PROBE_TOKENS), PROBE_TOKENS
        lengths = store.in_memory()
        sequence = max(range(len(lengths)), key=lambda index: lengths[index])
        if rows is None:
            # The budgets are full: rows that are there must do.
            many = lengths[sequence]
        times = []
        for count in (max(1, many // 8), many):
            runs = store.rows_in_memory(sequence, count) if rows is None else rows.runs_in_memory(count)
            for _, run in () if rows is None else runs:
                run.zero_()
            seconds = [host.rank.measure(store, runs, host.queries) for _ in range(REPEATS)]
            times.append((count, statistics.median(seconds)))
        (few, few_s), (many, many_s) = times
        slope = max(many_s - few_s, 1e-9) / max(many - few, 1)
        return slope, max(0.0, few_s - few * slope)

    def _timed(self, call: Callable[[], object]) -> float:
        """Seconds of a call, the accelerator's work included."""
        samples = []
        for _ in range(REPEATS):
            get_accelerator().synchronize()
            begun = time.perf_counter()
            call()
            get_accelerator().synchronize()
            samples.append(time.perf_counter() - begun)
        return statistics.median(samples)
