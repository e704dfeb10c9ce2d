"""What offloading needs of the machine's profile: read from its file, measured where that lacks it, and added to it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megakv.base.laws import CombinationError
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
    path = config.profile
    if path is None:
        return None
    if Path(path).is_dir():
        raise ValueError(f"megakv.offload.profile = {path!r} is a folder; name a file, which need not exist yet")
    if not Path(path).exists():
        if not Path(path).parent.is_dir():
            raise ValueError(
                f"megakv.offload.profile = {path!r}: there is no folder {str(Path(path).parent)!r}; make it, or name "
                "another file"
            )
        try:
            TemporaryFile(dir=Path(path).parent).close()
        except OSError as error:
            raise ValueError(
                f"megakv.offload.profile = {path!r} cannot be written: {error.strerror}; name another file, or leave "
                "it out to measure at every start"
            ) from error
        return None
    profile = load_record(HostProfile, path, setting="megakv.offload.profile", remedy=REMEDY)
    # Whatever other ranks there were.
    world = profile.fingerprint
    differences = world.differences(Fingerprint.of_this_process(hosts=world.hosts, ranks=world.ranks, dtype=dtype))
    if profile.host_link is not None and profile.emulated_link_gb_s != config.emulated_link_gb_s:
        differences.append("another emulated link")
    if differences:
        raise CombinationError(
            "foreign", f"megakv.offload.profile = {path!r} was measured elsewhere ({'; '.join(differences)}); {REMEDY}"
        )
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
        self._quantised: dict[str, float | None] = {}
        if config.kv_bits is not None:
            self._quantised["host_attention_bandwidth"] = None

    def profile(self, store: TieredStore, recomputation: Recomputation | None, host: HostRank | None) -> HostProfile:
        """The file that the JSON names, or else what is known already; what is missing there is measured now.

        `store` has rows; `recomputation` and `host` are there where they may be used. Raises as `read_profile`.
        """
        # Read again: `megakv profile`, or another engine, may have written to it since.
        found = read_profile(self._config, store.dtype) or self._known
        profile = found or HostProfile(fingerprint=Fingerprint.of_this_process(hosts=1, ranks=1, dtype=store.dtype))
        changes: dict[str, object] = {}
        if profile.host_link is None:
            changes |= {"host_link": self._linked(store), "emulated_link_gb_s": self._config.emulated_link_gb_s}
        if self._disk is not None and profile.disk != self._disk.place:
            read = self._disk.measure()
            if read or profile.disk:
                rate = self.sharers * read or None
                changes |= {"disk_bandwidth": rate, "disk": self._disk.place if read else ""}
        if recomputation is not None and store.input_bytes and profile.recompute_flops is None:
            changes |= self._recomputed(store, recomputation)
        if host is not None and not self._quantised and profile.host_attention_bandwidth is None:
            changes |= self._attended(store, host)
        self._known = profile.model_copy(update=changes)
        if self._config.profile is not None and self._known != found:
            self._known.save(self._config.profile)
        if host is not None and self._quantised and self._quantised["host_attention_bandwidth"] is None:
            self._quantised = {**self._attended(store, host)}
        return self._known.model_copy(update=self._quantised)

    def _linked(self, store: TieredStore) -> Curve:
        """Seconds of the link over bytes."""
        emulated = self._config.emulated_link_gb_s
        most = PROBE_BYTES if emulated is None else min(PROBE_BYTES, int(PROBE_S * emulated * 1e9))
        with self._rows(store, max(PROBE_ROWS, most // store.row_bytes)) as rows:
            device = torch.empty(rows.shape, dtype=rows.dtype, device=self._device)

            def sent(count: int, pieces: int = 1) -> tuple[int, float]:
                """Bytes and seconds of sending rows in equal pieces."""
                spans = pairwise(chunk_bounds(count, pieces).tolist())
                transfers = [[Move.of(rows[first:end], device[first:end])] for first, end in spans]

                def send() -> None:
                    [self._link.start("in", moves) for moves in transfers][-1].settle()

                return count * store.row_bytes, _median(send)

            few, many, pieces = sent(1), sent(len(rows)), sent(len(rows), PIECES)
        # In a row: whoever waits for a single one waits for a thread or an event to wake it, too.
        transfer_s, _ = affine((1, many[1]), (PIECES, pieces[1]))
        return Curve.affine(transfer_s, 1 / affine(few, many, share=LEAST_SHARE)[0])

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
            inputs = inputs.view(count, -1).to(store.dtype)
            positions = torch.zeros(count, dtype=torch.int64).numpy()

            def call(inputs: torch.Tensor = inputs, positions: object = positions) -> object:
                return recomputation.recompute(store.layer, inputs, positions)  # type: ignore[arg-type]

            times.append((count, _median(call)))
        token_s, call_s = affine(*times, share=LEAST_SHARE)
        return {"recompute_flops": recompute_operations(store) / token_s, "recompute_call_s": call_s}

    def _attended(self, store: TieredStore, host: HostRank) -> dict[str, float]:
        """What the host's attention costs per token, per sequence whatever its tokens, and whatever its sequences."""
        # No cache should hold them: others' rows and weights pass through it between two steps of decoding.
        with self._rows(store, max(PROBE_TOKENS, COLD_BYTES // store.row_bytes)) as rows:

            def seconds(count: int, sequences: int) -> float:
                runs = [(0, rows[:count])]
                return statistics.median(host.measure(store, runs, sequences) for _ in range(REPEATS))

            few, many = FEW_TOKENS, len(rows)
            once, alone, together = seconds(few, 1), seconds(many, 1), seconds(few, SEQUENCES)
        token_s, _ = affine((few, once), (many, alone), share=LEAST_SHARE)
        sequence_s, call_s = affine((1, once), (SEQUENCES, together))
        return {
            "host_attention_bandwidth": store.row_bytes / token_s,
            "host_sequence_s": max(0.0, sequence_s - few * token_s),
            "host_call_s": call_s,
        }


def recompute_operations(store: TieredStore) -> int:
    """Of recomputing a token's keys and values from its activations."""
    return 2 * store.input_width * store.row_width


def _median(call: Callable[[], object]) -> float:
    return statistics.median(timed(call) for _ in range(REPEATS))


def affine(few: tuple[int, float], many: tuple[int, float], *, share: float = 0.0) -> tuple[float, float]:
    """Seconds per unit, and those that any number takes, from units and seconds of a few and of many.

    Many take longer than a few by a `share` of their seconds, at least: noise may have swallowed the difference.
    """
    slope = max(many[1] - few[1], share * many[1]) / max(many[0] - few[0], 1)
    return slope, max(0.0, few[1] - few[0] * slope)
