"""What offloading needs of the machine's profile: read from its file, measured where that lacks it, and added to it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from megakv.base.errors import CombinationError
from megakv.costmodel.curves import Curve
from megakv.costmodel.hardware import Fingerprint, HostProfile
from megakv.costmodel.records import load_record
from megakv.costmodel.stopwatch import timed
from megakv.distributed.sharding import chunk_bounds
from megakv.offload.config import OffloadConfig
from megakv.offload.disk import DiskTier
from megakv.offload.host_memory import HostTier
from megakv.offload.host_rank import HostRank
from megakv.offload.link import Link, Move

if TYPE_CHECKING:
    from megakv.injection.recomputation import Recomputation
    from megakv.offload.store import TieredStore

REMEDY = "name another file, or remove it, and it is measured anew"
REPEATS = 5
"""How often something is measured."""
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
"""Of the time of many rows or tokens, what is theirs and not the call's, at least."""
PROBE_TOKENS, MANY_TOKENS = 512, 8192
"""Tokens that are attended to, or recomputed on a processor; and recomputed on an accelerator, where fewer take less
time than Python needs to start that."""


def read_profile(config: OffloadConfig, dtype: torch.dtype) -> HostProfile | None:
    """The profile in the file that the JSON names; None where it names none, or one that is yet to be written.

    A ValueError says that the file is of another machine or link, or cannot be written.
    """
    if config.profile is None:
        return None
    path, named = Path(config.profile), f"megakv.offload.profile = {config.profile!r}"
    if path.is_dir():
        raise ValueError(f"{named} is a folder; name a file, which need not exist yet")
    if not path.exists():
        if not path.parent.is_dir():
            raise ValueError(f"{named}: there is no folder {str(path.parent)!r}; make it, or name another file")
        try:
            TemporaryFile(dir=path.parent).close()
        except OSError as error:
            otherwise = "name another file, or leave it out to measure at every start"
            raise ValueError(f"{named} cannot be written: {error.strerror}; {otherwise}") from error
        return None
    profile = load_record(HostProfile, path, setting="megakv.offload.profile", remedy=REMEDY)
    # Whatever other ranks there were.
    world = profile.fingerprint
    differences = world.differences(Fingerprint.of_this_process(hosts=world.hosts, ranks=world.ranks, dtype=dtype))
    if profile.host_link is not None and profile.emulated_link_gb_s != config.emulated_link_gb_s:
        differences.append("another emulated link")
    if differences:
        raise CombinationError("foreign", f"{named} was measured elsewhere ({'; '.join(differences)}); {REMEDY}")
    return profile


class Profiler:
    """Measures what the profile lacks, with the link, the layers and the disk of one of `sharers` ranks of a host.

    Rows that are sent or attended to lie in memory of their own like that of the budget.
    """

    def __init__(
        self, config: OffloadConfig, link: Link, disk: DiskTier | None, device: torch.device, *, sharers: int = 1
    ):
        self.sharers = sharers
        self._config, self._link, self._disk, self._device = config, link, disk, device
        self._known: HostProfile | None = None
        # Of the host's attention to quantised rows: a file has the speed of those in a model's type.
        self._quantised: dict[str, float] = {}

    def profile(self, store: TieredStore, recomputation: Recomputation | None, host: HostRank | None) -> HostProfile:
        """The file that the JSON names, or else what is known already; what is missing there is measured now.

        `store` has rows; `recomputation` and `host` are there where they may be used. Raises as `read_profile`.
        """
        # Read again: `megakv profile`, or another engine, may have written to it since.
        found = read_profile(self._config, store.dtype) or self._known
        profile = found or HostProfile(fingerprint=Fingerprint.of_this_process(hosts=1, ranks=1, dtype=store.dtype))
        quantised, changes = self._config.kv_bits is not None, dict[str, object]()
        if profile.host_link is None:
            changes |= {"host_link": self._linked(store), "emulated_link_gb_s": self._config.emulated_link_gb_s}
        if self._disk is not None and profile.disk != self._disk.place:
            read = self._disk.measure()
            if read or profile.disk:
                rate = self.sharers * read or None
                changes |= {"disk_bandwidth": rate, "disk": self._disk.place if read else ""}
        if recomputation is not None and store.input_bytes and profile.recompute_flops is None:
            changes |= self._recomputed(store, recomputation)
        if host is not None and not quantised and profile.host_attention_bandwidth is None:
            changes |= self._attended(store, host)
        self._known = profile.model_copy(update=changes)
        if self._config.profile is not None and self._known != found:
            self._known.save(self._config.profile)
        if not quantised:
            return self._known
        if host is not None and not self._quantised:
            self._quantised = self._attended(store, host)
        return self._known.model_copy(update=self._quantised or {"host_attention_bandwidth": None})

    def _linked(self, store: TieredStore) -> Curve:
        """Seconds of the link over bytes."""
        emulated = self._config.emulated_link_gb_s
        most = PROBE_BYTES if emulated is None else min(PROBE_BYTES, int(PROBE_S * emulated * 1e9))
        with self._rows(store, max(PROBE_ROWS, most // store.row_bytes)) as rows:
            device = torch.empty(rows.shape, dtype=rows.dtype, device=self._device)

            def sent(count: int, pieces: int = 1) -> float:
                """Seconds of sending rows in equal pieces."""
                spans = pairwise(chunk_bounds(count, pieces).tolist())
                transfers = [[Move.of(rows[first:end], device[first:end])] for first, end in spans]
                return _median(lambda: [self._link.start("in", moves) for moves in transfers][-1].settle())

            few, many, pieces = sent(1), sent(len(rows)), sent(len(rows), PIECES)
        # In a row: whoever waits for a single one waits for a thread or an event to wake it, too.
        transfer_s, _ = affine((1, many), (PIECES, pieces), share=0.0)
        row_s, _ = affine((1, few), (len(rows), many))
        return Curve.affine(transfer_s, store.row_bytes / row_s)

    @contextmanager
    def _rows(self, store: TieredStore, count: int) -> Iterator[Tensor]:
        """So many rows like a store's."""
        memory = HostTier(count * store.row_bytes, pin=self._device.type == "cuda", free=lambda: None)
        yield memory.rows(0, count, store.stored_width, store.stored_dtype).zero_()
        memory.close()

    def _recomputed(self, store: TieredStore, recomputation: Recomputation) -> dict[str, float]:
        """What recomputing costs per token, and a call whatever its tokens."""
        times, many = [], PROBE_TOKENS if self._device.type == "cpu" else MANY_TOKENS
        for count in (many // 8, many):
            # No random numbers: the state that sampling draws from is the user's.
            inputs = torch.linspace(-1, 1, count * store.input_width, device=self._device)
            given = inputs.view(count, -1).to(store.dtype), np.zeros(count, dtype=np.int64)
            times.append((count, _median(partial(recomputation.recompute, store.layer, *given))))
        token_s, call_s = affine(*times)
        return {"recompute_flops": recompute_operations(store) / token_s, "recompute_call_s": call_s}

    def _attended(self, store: TieredStore, host: HostRank) -> dict[str, float]:
        """What the host's attention costs per token, per sequence whatever its tokens, and whatever its sequences."""
        # No cache should hold them: others' rows and weights pass through it between two steps of decoding.
        with self._rows(store, max(PROBE_TOKENS, COLD_BYTES // store.row_bytes)) as rows:
            few, many = FEW_TOKENS, len(rows)
            once, alone, together = (
                statistics.median(host.measure(store, [(0, rows[:count])], sequences) for _ in range(REPEATS))
                for count, sequences in ((few, 1), (many, 1), (few, SEQUENCES))
            )
        token_s, _ = affine((few, once), (many, alone))
        sequence_s, call_s = affine((1, once), (SEQUENCES, together), share=0.0)
        return {
            "host_attention_bandwidth": store.row_bytes / token_s,
            "host_sequence_s": max(0.0, sequence_s - few * token_s),
            "host_call_s": call_s,
        }


def recompute_operations(store: TieredStore) -> int:
    """Operations of recomputing a token's keys and values from its activations."""
    return 2 * store.input_width * store.row_width


def affine(few: tuple[int, float], many: tuple[int, float], *, share: float = LEAST_SHARE) -> tuple[float, float]:
    """Seconds per unit, and those that any number takes, from units and seconds of a few and of many.

    Many take longer than a few by a `share` of their seconds, at least: noise may have swallowed the difference.
    """
    slope = max(many[1] - few[1], share * many[1]) / max(many[0] - few[0], 1)
    return slope, max(0.0, few[1] - few[0] * slope)


def _median(call: Callable[[], object]) -> float:
    return statistics.median(timed(call) for _ in range(REPEATS))
