"""Measured speeds of one machine for one model: what plans rest on before steps have shown more, kept in a file."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any, Literal

import torch
from deepspeed.accelerator import get_accelerator
from pydantic import Field, model_validator
from torch import Tensor

from megakv.costmodel.hardware import Fingerprint
from megakv.costmodel.offload import affine
from megakv.costmodel.records import Record, load_record
from megakv.distributed.sharding import chunk_bounds
from megakv.offload.config import OffloadConfig
from megakv.offload.disk import DiskTier
from megakv.offload.host_memory import HostTier
from megakv.offload.host_rank import HostRank
from megakv.offload.link import Link, Move

if TYPE_CHECKING:
    from megakv.injection.recomputation import Recomputation
    from megakv.offload.store import TieredStore

REMEDY = "remove it, and it is measured anew"
UNREAD = ("out_bytes_s", "both_bytes_s", "disk_write_bytes_s")
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


class OffloadProfile(Record):
    """Measured speeds of one machine for one model, in one layer; what is 0 was not measured, as no method needed it.

    `row_bytes` and `input_bytes` are those of a token's keys and values, and of its activations. `transfer_s` is what a
    transfer costs whatever its size, `launch_s` a recomputation beside `recompute_s` for each token, and the host's
    attention `host_fixed_s` for each sequence, and `host_call_s` at all, beside `host_attend_s` for each token.
    `disk` says which disk is read at `disk_read_bytes_s`, past the page cache where the file system allows: its folder,
    and how. Recomputation is the attention modules' own code, hence `model_type`, which is empty in older files.
    """

    format: Literal["megakv offload profile"] = "megakv offload profile"
    fingerprint: Fingerprint
    model_type: str = ""
    row_bytes: int = Field(gt=0)
    input_bytes: int = Field(ge=0)
    link_bytes_s: float = Field(gt=0)
    transfer_s: float = Field(ge=0)
    recompute_s: float = Field(default=0.0, ge=0)
    launch_s: float = Field(default=0.0, ge=0)
    host_attend_s: float = Field(default=0.0, ge=0)
    host_fixed_s: float = Field(default=0.0, ge=0)
    host_call_s: float = Field(default=0.0, ge=0)
    disk_read_bytes_s: float = Field(default=0.0, ge=0)
    disk: str = ""
    emulated_link_gb_s: float | None = None

    @model_validator(mode="before")
    @classmethod
    def _of_today(cls, values: Any) -> Any:
        """Older files have speeds that nothing reads any more."""
        if not isinstance(values, dict):
            return values
        return {name: value for name, value in values.items() if name not in UNREAD}


def _foreign(config: OffloadConfig, why: str) -> ValueError:
    """The refusal of a profile that is not of this machine, model and link."""
    return ValueError(f"megakv.offload.profile = {config.profile!r} was measured elsewhere ({why}); {REMEDY}")


def read_profile(config: OffloadConfig, dtype: torch.dtype, model_type: str) -> OffloadProfile | None:
    """The profile in the file that the JSON names; None where it names none, or one that is yet to be written.

    A ValueError says that the file is of another machine, model type or link, or cannot be written.
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
    profile = load_record(OffloadProfile, path, setting="megakv.offload.profile", remedy=REMEDY)
    differences = profile.fingerprint.differences(_fingerprint(dtype))
    if profile.model_type and profile.model_type != model_type:
        differences.append(f"model type {profile.model_type!r}, here {model_type!r}")
    if profile.emulated_link_gb_s != config.emulated_link_gb_s:
        differences.append("another emulated link")
    if differences:
        raise _foreign(config, "; ".join(differences))
    return profile


def _fingerprint(dtype: torch.dtype) -> Fingerprint:
    """Of this process, whatever other ranks there are."""
    return Fingerprint.of_this_process(hosts=1, ranks=1, dtype=dtype)


class Profiler:
    """Measures what the profile says, with the link, the layers and the disk of one engine.

    Rows that are sent or attended to lie in memory of their own like that of the budget.
    """

    def __init__(self, config: OffloadConfig, link: Link, disk: DiskTier | None, device: torch.device, model_type: str):
        self._config, self._model_type = config, model_type
        self._link, self._disk, self._device = link, disk, device

    def profile(
        self,
        store: TieredStore,
        recomputation: Recomputation | None,
        host: HostRank | None,
        known: OffloadProfile | None = None,
    ) -> OffloadProfile:
        """What is known already, or else the file that the JSON names; what is missing there is measured now.

        `store` has rows; `recomputation` and `host` are there where they may be used. Raises as `load`.
        """
        found = known or self.load(store)
        profile = found or self._link_profile(store)
        changes: dict[str, object] = {"input_bytes": max(profile.input_bytes, store.input_bytes)}
        if self._disk is not None and profile.disk != self._disk.place:
            read = self._disk.measure()
            if read or profile.disk:
                changes |= {"disk_read_bytes_s": read, "disk": self._disk.place if read else ""}
        if recomputation is not None and store.input_bytes and not (profile.recompute_s or profile.launch_s):
            changes |= self._recomputed(store, recomputation)
        if host is not None and not profile.host_attend_s:
            changes |= self._attended(store, host)
        profile = profile.model_copy(update=changes)
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
                raise _foreign(self._config, why)
        return profile

    def _link_profile(self, store: TieredStore) -> OffloadProfile:
        """The link alone."""
        emulated = self._config.emulated_link_gb_s
        most = PROBE_BYTES if emulated is None else min(PROBE_BYTES, int(PROBE_S * emulated * 1e9))
        with self._rows(store, max(PROBE_ROWS, most // store.row_bytes)) as rows:
            device = torch.empty(rows.shape, dtype=rows.dtype, device=self._device)

            def sent(count: int, pieces: int = 1) -> tuple[int, float]:
                """Bytes and seconds of sending rows in equal pieces."""
                spans = pairwise(chunk_bounds(count, pieces).tolist())
                transfers = [[Move(rows[first:end], device[first:end])] for first, end in spans]

                def send() -> None:
                    [self._link.start("in", moves) for moves in transfers][-1].settle()

                return count * store.row_bytes, self._timed(send)

            few, many, pieces = sent(1), sent(len(rows)), sent(len(rows), PIECES)
        return OffloadProfile(
            fingerprint=_fingerprint(store.dtype),
            model_type=self._model_type,
            row_bytes=store.row_bytes,
            input_bytes=store.input_bytes,
            link_bytes_s=1 / affine(few, many, share=LEAST_SHARE)[0],
            # In a row: whoever waits for a single one waits for a thread or an event to wake it, too.
            transfer_s=affine((1, many[1]), (PIECES, pieces[1]))[0],
            emulated_link_gb_s=emulated,
        )

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

            times.append((count, self._timed(call)))
        return dict(zip(("recompute_s", "launch_s"), affine(*times, share=LEAST_SHARE), strict=True))

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
            "host_attend_s": token_s,
            "host_fixed_s": max(0.0, sequence_s - few * token_s),
            "host_call_s": call_s,
        }

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
