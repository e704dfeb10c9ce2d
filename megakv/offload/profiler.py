"""The profiler: what the link, the disk and recomputation take on this machine, measured once and kept in a file."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator

from megakv.costmodel.offload import affine
from megakv.distributed.sharding import chunk_bounds
from megakv.offload.config import OffloadConfig
from megakv.offload.disk_speed import disk_rates
from megakv.offload.host_rank import HostRank, Queries
from megakv.offload.link import Link
from megakv.offload.pages import PagedRows, unwritten
from megakv.offload.pool import PagePool
from megakv.offload.profile import OffloadProfile, fingerprint_of, foreign, read_profile

if TYPE_CHECKING:
    from megakv.injection.recomputation import Recomputation
    from megakv.offload.store import TieredStore

REPEATS, FEW = 5, 2
"""How often something is measured: what plans rest on, and what only the profile says."""
PROBE_BYTES = 16 << 20
"""Rows that are sent to measure the link, at most."""
PROBE_ROWS = 16
"""At least."""
PIECES = 8
"""Transfers that they are sent in to measure what each costs."""
PROBE_S = 0.025
"""An emulated link is measured with what it sends in that time."""
FEW_TOKENS, SEQUENCES = 16, 16
"""Of each sequence, and sequences, that are attended to for what that costs whatever the number of tokens."""
COLD_BYTES = 64 << 20
"""Rows that are attended to at most: more than caches hold."""
LEAST_SHARE = 0.1
"""Of the time of many rows or tokens, what is theirs and not the call's, at least: few may be all there is room for."""
PROBE_TOKENS, MANY_TOKENS = 512, 8192
"""Tokens that are attended to, or recomputed on a processor; and recomputed on an accelerator, where fewer take less
time than Python needs to start that."""


class HostTrial(NamedTuple):
    """What the host's attention is measured with."""

    rank: HostRank
    queries: Queries


class Profiler:
    """Measures what the profile says, with the link, the layers and the unused pages of one engine."""

    def __init__(self, config: OffloadConfig, link: Link, pool: PagePool, device: torch.device, model_type: str):
        self._config = config
        self._model_type = model_type
        self._link = link
        self._pool = pool
        self._device = device

    def profile(
        self,
        store: TieredStore,
        recomputation: Recomputation | None,
        host: HostTrial | None,
        known: OffloadProfile | None = None,
    ) -> OffloadProfile:
        """What is known already, or else the file that the JSON names; what is missing there is measured now.

        `store` has rows; `recomputation` and `host` are there where they may be used. Raises as `load`.
        """
        found = known or self.load(store)
        profile = found or self._link_profile(store)
        profile = profile.model_copy(update={"input_bytes": max(profile.input_bytes, store.input_bytes)})
        disk = self._pool.disk
        if disk is not None and profile.disk != disk.place:
            read, written = disk_rates(disk, self._pool, store.stored_width, store.stored_dtype)
            if read or profile.disk:
                rates = {"disk_read_bytes_s": read, "disk_write_bytes_s": written, "disk": disk.place if read else ""}
                profile = profile.model_copy(update=rates)
        if recomputation is not None and store.input_bytes and not (profile.recompute_s or profile.launch_s):
            recompute_s, launch_s = self._recomputed(store, recomputation)
            profile = profile.model_copy(update={"recompute_s": recompute_s, "launch_s": launch_s})
        if host is not None and not profile.host_attend_s:
            profile = profile.model_copy(update=self._attended(store, host))
        if self._config.profile is not None and known is None and profile != found:
            profile.save(self._config.profile)
        return profile

    def load(self, store: TieredStore) -> OffloadProfile | None:
        """What the file that the JSON names says of a store's rows; None without one.

        A ValueError says that it is of another machine or model.
        """
        profile = read_profile(self._config, store.dtype, self._model_type)
        if profile is None:
            return None
        # Methods that keep no activations do not know how large they are.
        sizes = {"keys and values": (profile.row_bytes, store.row_bytes)}
        if profile.input_bytes and store.input_bytes:
            sizes["activations"] = profile.input_bytes, store.input_bytes
        for kind, (found, own) in sizes.items():
            if found != own:
                why = f"{found} bytes of {kind} for a token in a layer, here {own}: another model, tp_size or kv_bits"
                raise foreign(self._config, why)
        return profile

    def _link_profile(self, store: TieredStore) -> OffloadProfile:
        """The link alone."""
        emulated = self._config.emulated_link_gb_s
        most = PROBE_BYTES if emulated is None else min(PROBE_BYTES, int(PROBE_S * emulated * 1e9))
        most = max(most, PROBE_ROWS * store.row_bytes)
        few, many, pieces = self._sent(store, 1), self._sent(store, most), self._sent(store, most, pieces=PIECES)
        slope, _ = affine(few, many, share=LEAST_SHARE)
        out_bytes_s, both_bytes_s = self._other_ways(store, most)
        return OffloadProfile(
            fingerprint=fingerprint_of(store.dtype),
            model_type=self._model_type,
            row_bytes=store.row_bytes,
            input_bytes=store.input_bytes,
            link_bytes_s=1 / slope,
            # In a row: whoever waits for a single one waits for a thread or an event to wake it, too.
            transfer_s=affine((1, many[1]), (PIECES, pieces[1]))[0],
            out_bytes_s=out_bytes_s,
            both_bytes_s=both_bytes_s,
            emulated_link_gb_s=emulated,
        )

    def _sent(self, store: TieredStore, nbytes: int, *, pieces: int = 1) -> tuple[int, float]:
        """Bytes and seconds of sending rows of the store's width, out of pages that nobody uses, in equal pieces."""
        count, width, dtype = max(1, nbytes // store.row_bytes), store.stored_width, store.stored_dtype
        rows = self._probe(store, count)
        if rows is not None:
            moves_of = rows.moves
        else:
            # The budgets are full: what is there must do, activations where no other rows lie in memory.
            lengths, held = store.in_memory(), store.in_memory(inputs=True)
            inputs = any(held) and not any(lengths)
            lengths = held if inputs else lengths if any(lengths) else store.lengths()
            sequence = max(range(len(lengths)), key=lambda index: lengths[index])
            count = min(count, lengths[sequence])
            moves_of = partial(store.input_moves if inputs else store.row_moves, sequence)
            width, dtype = (store.input_width, store.dtype) if inputs else (width, dtype)
        target = torch.empty((count, width), dtype=dtype, device=self._device)
        transfers = []
        for first, end in pairwise(chunk_bounds(count, min(pieces, count)).tolist()):
            part = target[first:end]
            moves, pages = moves_of(first, part)
            for ticket in unwritten(pages):
                ticket.settle()
            transfers.append(moves)

        def send() -> None:
            [self._link.start("in", moves) for moves in transfers][-1].settle()

        return count * width * dtype.itemsize, self._timed(send)

    def _other_ways(self, store: TieredStore, nbytes: int) -> tuple[float, float]:
        """Bandwidth from the accelerator, and to it while as much goes the other way; 0 without unused pages."""
        count = max(1, nbytes // store.row_bytes)
        found = [self._probe(store, count) for _ in range(2)]
        transfers, traffic = [], self._link.traffic["out"]
        before = traffic.nbytes
        for rows in found:
            if rows is None:
                return 0.0, 0.0
            device = torch.empty((count, store.stored_width), dtype=store.stored_dtype, device=self._device)
            moves, pages = rows.moves(0, device)
            for ticket in unwritten(pages):
                ticket.settle()
            transfers.append(moves)

        def out() -> None:
            self._link.start("out", transfers[0]).settle()

        def both() -> None:
            other = self._link.start("out", transfers[0])
            self._link.start("in", transfers[1]).settle()
            other.settle()

        sent = count * store.row_bytes
        rates = sent / self._timed(out, FEW), sent / self._timed(both, FEW)
        # What the model sends is counted, not this.
        traffic.nbytes = before
        return rates

    def _probe(self, store: TieredStore, count: int) -> PagedRows | None:
        """Rows like a store's in pages of host memory that nobody uses; None where there are too few."""
        memory = self._pool.tiers[0]
        rows = PagedRows(self._pool, store.stored_width, store.stored_dtype, only=memory)
        # No garbage is collected for a probe: where memory is full, every one of them would.
        if rows.bytes_for(count) > self._pool.free_bytes(memory):
            return None
        rows.extend(count)
        return rows

    def _recomputed(self, store: TieredStore, recomputation: Recomputation) -> tuple[float, float]:
        """Seconds per token, and of a call whatever its tokens."""
        times, many = [], PROBE_TOKENS if self._device.type == "cpu" else MANY_TOKENS
        for count in (many // 8, many):
            # No random numbers: the state that sampling draws from is the user's.
            inputs = torch.linspace(-1, 1, count * store.input_width, device=self._device)
            inputs = inputs.view(count, -1).to(store.dtype)
            positions = torch.zeros(count, dtype=torch.int64).numpy()

            def call(inputs: torch.Tensor = inputs, positions: object = positions) -> object:
                return recomputation.recompute(store.layer, inputs, positions)  # type: ignore[arg-type]

            times.append((count, self._timed(call)))
        return affine(*times, share=LEAST_SHARE)

    def _attended(self, store: TieredStore, host: HostTrial) -> dict[str, float]:
        """What the host's attention costs per token, per sequence whatever its tokens, and whatever its sequences."""
        # No cache should hold them: others' rows and weights pass through it between two steps of decoding.
        most = max(PROBE_TOKENS, COLD_BYTES // store.row_bytes)
        room = self._pool.free_bytes(self._pool.tiers[0]) // (2 * store.row_bytes)
        rows = self._probe(store, max(PROBE_TOKENS, min(most, room)))
        if rows is not None:
            runs_of, many = rows.runs_in_memory, rows.length
            for _, run in runs_of(many):
                run.zero_()
        else:
            # The budgets are full: rows that are there must do.
            lengths = store.in_memory()
            sequence = max(range(len(lengths)), key=lambda index: lengths[index])
            runs_of, many = partial(store.rows_in_memory, sequence), lengths[sequence]

        def seconds(count: int, sequences: int) -> float:
            runs = runs_of(count)
            samples = [host.rank.measure(store, runs, host.queries, sequences) for _ in range(REPEATS)]
            return statistics.median(samples)

        few = max(1, min(FEW_TOKENS, many // 8))
        once, alone = seconds(few, 1), seconds(many, 1)
        token_s, _ = affine((few, once), (many, alone), share=LEAST_SHARE)
        sequence_s, call_s = affine((1, once), (SEQUENCES, seconds(few, SEQUENCES)))
        return {
            "host_attend_s": token_s,
            "host_fixed_s": max(0.0, sequence_s - few * token_s),
            "host_call_s": call_s,
        }

    def _timed(self, call: Callable[[], object], repeats: int = REPEATS) -> float:
        """Seconds of a call, the accelerator's work included."""
        samples = []
        for _ in range(repeats):
            get_accelerator().synchronize()
            begun = time.perf_counter()
            call()
            get_accelerator().synchronize()
            samples.append(time.perf_counter() - begun)
        return statistics.median(samples)
