"""Lookup tables of imagined chains."""

from __future__ import annotations

import random
from typing import Any

import torch

from megakv.base.partition import to_fractions
from megakv.costmodel.shape import LayerShape, ModelShape
from megakv.runahead.table import ChainIdentity, LookupTable, ModelIdentity, TableEntry
from tests.unit.costmodel.profiles import fingerprint

MODEL = ModelShape(
    hidden=64,
    intermediate=96,
    vocab=100,
    heads=4,
    kv_heads=2,
    key_dim=16,
    value_dim=16,
    layers=(LayerShape(1000), LayerShape(1000)),
    embedding=6400,
    dtype=torch.float32,
)


def chain(ranks: int = 3, **changes: Any) -> ChainIdentity:
    values = {
        "model": ModelIdentity.of(MODEL),
        "fingerprint": fingerprint(ranks=ranks),
        "ranks": ranks,
        "tp": 1,
        "kv": "sharded",
    }
    return ChainIdentity(**{**values, **changes})


def entry(context: int, parts: tuple[int, ...]) -> TableEntry:
    return TableEntry(
        context=context, fractions=to_fractions(parts), ttft_s=context / 1000, even_ttft_s=context / 900, evaluations=9
    )


def table(entries: dict[int, tuple[int, ...]], **changes: Any) -> LookupTable:
    """A table of contexts and their partitions."""
    ranks = len(next(iter(entries.values())))
    found = tuple(entry(context, parts) for context, parts in sorted(entries.items()))
    return LookupTable(chain=chain(ranks, **changes), entries=found)


def any_table(ranks: int, contexts: int) -> LookupTable:
    """Random entries."""
    lengths = random.sample(range(ranks, 50_000), contexts)
    return table({length: tuple(random.randint(1, 1000) for _ in range(ranks)) for length in lengths})
