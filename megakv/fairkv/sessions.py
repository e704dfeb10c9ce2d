"""What a saved session holds of ragged and shared heads, read back into a layer's store.

`files` are those of all context-parallel ranks that saved; `prefix` begins the names of the layer's tensors. A missing,
truncated or foreign file is a `MegaKVError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from megakv.cache.stores import KVStore
from megakv.distributed.sharding import IntArray
from megakv.errors import MegaKVError
from megakv.fairkv.divided import DividedStore
from megakv.fairkv.pages import RaggedBody
from megakv.fairkv.splitting import HeadShares
from megakv.fairkv.store import RaggedStore, Span
from megakv.tensor_files import read_where_present


def _parts(files: list[Path], prefix: str, *kinds: str) -> list[dict[str, Tensor]]:
    """Tensors of the files that have them, by kind."""
    names = [prefix + kind for kind in kinds]
    return [
        {kind: part[name] for kind, name in zip(kinds, names, strict=True)} for part in read_where_present(files, names)
    ]


def is_dense(slots: IntArray, spans: Sequence[Sequence[int]]) -> npt.NDArray[np.bool_]:
    """Which slots are in none of the compressed ranges."""
    dense = np.ones(len(slots), dtype=bool)
    for first, last in spans:
        dense &= (slots < first) | (slots >= last)
    return dense


def read_spans(
    files: list[Path],
    prefix: str,
    slots: IntArray,
    spans: Sequence[Sequence[int]],
    store: KVStore,
    sequence: int,
    device: torch.device,
) -> None:
    """Gather what heads have kept of compressed ranges: `spans` has the first slot of each and the one behind its last.

    `slots` are those of all tokens of the sequence that are this rank's now. A rank numbers those ranges alone of which
    it had tokens, so a range is found by its slots.
    """
    assert isinstance(store, RaggedStore)
    found = [
        part
        for number in range(len(spans))
        for part in _parts(files, f"{prefix}kept{number}.", "counts", "slots", "k", "v")
    ]
    for span in spans:
        start, stop = map(int, np.searchsorted(slots, span))
        try:
            body = RaggedBody.joined(found, slots[start:stop], start, device)
        except (ValueError, IndexError) as error:
            raise MegaKVError(f"{files[0].parent}: its files do not fit together in {prefix}: {error}") from error
        if stop > start:
            store.add_span(sequence, Span(start, stop, body))


def read_shares(
    files: list[Path],
    prefix: str,
    slots: IntArray,
    alone: tuple[Tensor, Tensor] | None,
    shares: HeadShares,
    store: KVStore,
    sequence: int,
    device: torch.device,
) -> None:
    """Take in the uncompressed tokens of a sequence, those of shared heads as they were dealt out.

    `slots` are those of the uncompressed tokens that are this rank's now; `alone` are their keys and values in heads
    that no other rank holds, None where there are no such heads.
    """
    assert isinstance(store, RaggedStore | DividedStore)
    shared = {}
    for index in range(len(shares.patterns)):
        found = _parts(files, f"{prefix}shared{index}.", "slots", "k", "v")
        if not all(
            part["k"].dim() == part["v"].dim() == 3
            and len(part["k"]) == 1
            and len(part["slots"]) == part["k"].shape[1] == part["v"].shape[1]
            for part in found
        ):
            raise MegaKVError(f"{files[0].parent}: its files do not fit together in {prefix}shared{index}")
        if not found:
            continue
        slot = torch.cat([part["slots"] for part in found]).numpy()
        order = np.argsort(slot, kind="stable")
        order = order[np.isin(slot[order], slots)]
        if len(order):
            rows = torch.from_numpy(order)
            keys, values = (torch.cat([part[kind] for part in found], dim=1)[:, rows].to(device) for kind in ("k", "v"))
            shared[index] = slot[order], (keys, values)
    store.fill(sequence, slots, alone, shared)
