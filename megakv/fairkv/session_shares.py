"""Tokens of a saved session whose KV heads several tensor-parallel ranks share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from megakv.cache.stores import KVStore
from megakv.distributed.sharding import IntArray
from megakv.errors import MegaKVError
from megakv.fairkv.divided import DividedStore
from megakv.fairkv.shares import HeadShares
from megakv.fairkv.store import RaggedStore
from megakv.tensor_files import read_where_present

KINDS = ("slots", "k", "v")


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
    """Put the uncompressed tokens of a sequence into a layer's store, those of shared heads as they were dealt out.

    Parameters
    ----------
    files : list of Path
        Of all context-parallel ranks that saved.
    prefix : str
        What the names of the layer's tensors begin with.
    slots : IntArray
        Of the sequence's uncompressed tokens that are this rank's now.
    alone : tuple of Tensor, optional
        Their keys and values in heads that no other rank holds; None where there are no such heads.
    shares : HeadShares
    store : KVStore
    sequence : int
    device : torch.device

    Raises
    ------
    MegaKVError
        If a file is missing, truncated or does not fit.
    """
    assert isinstance(store, RaggedStore | DividedStore)
    shared = {}
    for index in range(len(shares.patterns)):
        names = [f"{prefix}shared{index}.{kind}" for kind in KINDS]
        found = list(read_where_present(files, names))
        if not found:
            continue
        held, keys, values = ([part[name] for part in found] for name in names)
        fits = all(k.dim() == v.dim() == 3 and len(k) == 1 for k, v in zip(keys, values, strict=True)) and all(
            len(s) == k.shape[1] == v.shape[1] for s, k, v in zip(held, keys, values, strict=True)
        )
        if not fits:
            raise MegaKVError(f"{files[0].parent}: its files do not fit together in {prefix}shared{index}")
        slot = torch.cat(held).numpy()
        order = np.argsort(slot, kind="stable")
        order = order[np.isin(slot[order], slots)]
        if len(order):
            rows = torch.from_numpy(order)
            pair = torch.cat(keys, dim=1)[:, rows].to(device), torch.cat(values, dim=1)[:, rows].to(device)
            shared[index] = slot[order], pair
    store.fill(sequence, slots, alone, shared)
