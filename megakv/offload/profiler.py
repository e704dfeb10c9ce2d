"""The profiler: what the link and recomputation take on this machine, measured once and kept in a file."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from pydantic import Field

from megakv.costmodel.hardware import Fingerprint
from megakv.costmodel.records import Record, load_record
from megakv.offload.config import OffloadConfig
from megakv.offload.host_rank import HostRank, Queries
from megakv.offload.link import Link
from megakv.offload.pages import PagedRows, unwritten
from megakv.offload.pool import PagePool
from megakv.sharding import chunk_bounds

if TYPE_CHECKING:
    from megakv.injection.recomputation import Recomputation
    from megakv.offload.store import TieredStore

REPEATS = 5
PROBE_BYTES = 16 << 20
"""Rows that are sent to measure the link, at most."""
PROBE_ROWS = 16
"""At least."""
PIECES = 8
"""Transfers that they are sent in to measure what each costs."""
PROBE_S = 0.025
"""An emulated link is measured with what it sends in that time."""
PROBE_TOKENS = 512


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


class Profiler:
    """Measures what the profile says, with the link, the layers and the pages of one engine.

    Parameters
    ----------
    config : OffloadConfig
    link : Link
    pool : PagePool
        Whose unused pages the link and the host are measured with.
    device : torch.device
    """

    def __init__(self, config: OffloadConfig, link: Link, pool: PagePool, device: torch.device):
        self._config = config
        self._link = link
        self._pool = pool
        self._device = device

    def profile(
        self, store: TieredStore, recomputation: Recomputation | None, host: HostTrial | None
    ) -> OffloadProfile:
        """The file that the JSON names, or else what is measured now.

        Raises
        ------
        ValueError
            If the file is of another machine or model.
        """
        return self._load(store) or self._measure(store, recomputation, host)

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
        most = max(most, PROBE_ROWS * store.row_bytes)
        few, many, pieces = self._sent(store, 1), self._sent(store, most), self._sent(store, most, pieces=PIECES)
        slope = max(many[1] - few[1], 1e-9) / max(many[0] - few[0], 1)
        profile = OffloadProfile(
            fingerprint=self._fingerprint(store),
            row_bytes=store.row_bytes,
            input_bytes=store.input_bytes,
            link_bytes_s=1 / slope,
            # In a row: whoever waits for a single one waits for a thread or an event to wake it, too.
            transfer_s=max(0.0, (pieces[1] - many[1]) / (PIECES - 1)),
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

    def _sent(self, store: TieredStore, nbytes: int, *, pieces: int = 1) -> tuple[int, float]:
        """Bytes and seconds of sending rows of the store's width, out of pages that nobody uses, in equal pieces."""
        count = max(1, nbytes // store.row_bytes)
        rows = self._probe(store, count)
        if rows is None:
            # The budgets are full: rows that are there must do.
            lengths = store.lengths()
            sequence = max(range(len(lengths)), key=lambda index: lengths[index])
            count = min(count, lengths[sequence])
        target = torch.empty((count, store.stored_width), dtype=store.stored_dtype, device=self._device)
        transfers = []
        for first, end in pairwise(chunk_bounds(count, min(pieces, count)).tolist()):
            part = target[first:end]
            moves, pages = store.row_moves(sequence, first, part) if rows is None else rows.moves(first, part)
            for ticket in unwritten(pages):
                ticket.settle()
            transfers.append(moves)

        def send() -> None:
            [self._link.start("in", moves) for moves in transfers][-1].settle()

        return count * store.row_bytes, self._timed(send)

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
