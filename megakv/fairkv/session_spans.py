"""Compressed ranges of a saved session."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from megakv.cache.stores import KVStore
from megakv.distributed.sharding import IntArray
from megakv.errors import MegaKVError
from megakv.fairkv.pages import RaggedBody
from megakv.fairkv.store import RaggedStore, Span
from megakv.tensor_files import read_where_present

KINDS = ("counts", "slots", "k", "v")


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
    """Put what heads have kept of compressed ranges, gathered from the files that hold it, into a layer's store.

    A rank numbers those ranges alone of which it had tokens, so a range is found by its slots.

    Parameters
    ----------
    files : list of Path
        Of all context-parallel ranks that saved.
    prefix : str
        What the names of the layer's tensors begin with.
    slots : IntArray
        Of all tokens of the sequence that are this rank's now.
    spans : sequence of sequence of int
        First slot of each range, and the one behind its last.
    store : KVStore
    sequence : int
    device : torch.device

    Raises
    ------
    MegaKVError
        If a file is missing, truncated or does not fit.
    """
    assert isinstance(store, RaggedStore)
    found = []
    for number in range(len(spans)):
        names = [f"{prefix}kept{number}.{kind}" for kind in KINDS]
        for part in read_where_present(files, names):
            found.append({kind: part[name] for kind, name in zip(KINDS, names, strict=True)})
    for span in spans:
        start, stop = map(int, np.searchsorted(slots, span))
        try:
            body = RaggedBody.joined(found, slots[start:stop], start, device)
        except (ValueError, IndexError) as error:
            raise MegaKVError(f"{files[0].parent}: its files do not fit together in {prefix}: {error}") from error
        if stop > start:
            store.add_span(sequence, Span(start, stop, body))
