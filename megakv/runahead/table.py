"""The lookup table of searched partitions, and their interpolation (KV-Runahead, Sections 4.2 and 4.3)."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from megakv.attention.runahead import CHUNK_TOKENS
from megakv.base.partition import TOLERANCE
from megakv.costmodel.curves import Positive
from megakv.costmodel.hardware import Fingerprint, Share, fingerprint
from megakv.costmodel.records import Record, load_record
from megakv.costmodel.shape import ModelShape
from megakv.distributed.comm import Communicator

SETTING = "megakv.runahead.table"
REMEDY = "write a new one with megakv search-partition --table FILE"

KVEnd = Literal["sharded", "last"]


class ModelIdentity(BaseModel):
    """What of a model decides how long its layers take."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    hidden: int = Field(ge=1)
    intermediate: int = Field(ge=0)
    vocab: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    key_dim: int = Field(ge=1)
    value_dim: int = Field(ge=1)
    layers: int = Field(ge=1)
    parameters: int = Field(ge=1)  # Elements of all weights.
    # Attention window of each layer, None for full attention; empty where no layer has one.
    windows: tuple[int | None, ...] = ()
    dtype: str  # Of weights and cache, as in ``float32``.

    @classmethod
    def of(cls, shape: ModelShape) -> ModelIdentity:
        """That of a model."""
        windows = tuple(layer.window for layer in shape.layers)
        names = ("hidden", "intermediate", "vocab", "heads", "kv_heads", "key_dim", "value_dim", "parameters")
        return cls(
            **{name: getattr(shape, name) for name in names},
            layers=len(shape.layers),
            windows=windows if any(windows) else (),
            dtype=str(shape.dtype).removeprefix("torch."),
        )


class ChainIdentity(BaseModel):
    """What searched partitions belong to."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: ModelIdentity
    fingerprint: Fingerprint  # The machine and the world.
    # Links of the chain (context-parallel degree), and tensor-parallel ranks of each.
    ranks: int = Field(ge=2)
    tp: int = Field(ge=1)
    kv: KVEnd  # How the chain ends: ``sharded`` or ``last``.
    chunk_tokens: int = Field(default=CHUNK_TOKENS, ge=1)  # Tokens that are forwarded at a time.

    @classmethod
    def of(cls, comm: Communicator, model: ModelShape, *, kv: KVEnd, chunk_tokens: int) -> ChainIdentity:
        """The chain of these ranks. Every rank must call it."""
        return cls(
            model=ModelIdentity.of(model),
            fingerprint=fingerprint(comm, model.dtype),
            ranks=comm.mesh.cp_size,
            tp=comm.mesh.tp_size,
            kv=kv,
            chunk_tokens=chunk_tokens,
        )

    def differences(self, here: ChainIdentity) -> list[str]:
        """What another chain has otherwise, in words."""
        own, other = (chain.model_dump(exclude={"fingerprint"}) for chain in (self, here))
        model, others = own.pop("model"), other.pop("model")
        own |= {f"model's {name}": value for name, value in model.items()}
        other |= {f"model's {name}": value for name, value in others.items()}
        found = [f"{name} {own[name]!r}, here {other[name]!r}" for name in own if own[name] != other[name]]
        return found + self.fingerprint.differences(here.fingerprint)


class TableEntry(BaseModel):
    """The best partition found for one length of prompt."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    context: int = Field(ge=1, le=1 << 40)
    fractions: tuple[Share, ...]  # Of each rank, rank 0 first.
    ttft_s: Positive
    even_ttft_s: Positive  # With even shares.
    evaluations: int = Field(ge=1)  # Partitions that were measured to find it.

    @model_validator(mode="after")
    def _sums_to_one(self) -> Self:
        if abs(math.fsum(self.fractions) - 1) > TOLERANCE:
            raise ValueError(f"fractions of context {self.context} sum to {math.fsum(self.fractions):g}, not 1")
        return self


class LookupTable(Record):
    """Searched partitions of one model on one machine, contexts ascending."""

    format: Literal["megakv partition table"] = "megakv partition table"
    version: Literal[1] = 1
    chain: ChainIdentity
    entries: tuple[TableEntry, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        contexts = [entry.context for entry in self.entries]
        if contexts != sorted(set(contexts)):
            raise ValueError("entries must have ascending contexts, each once")
        for entry in self.entries:
            if len(entry.fractions) != self.chain.ranks:
                raise ValueError(
                    f"context {entry.context} has {len(entry.fractions)} fractions for {self.chain.ranks} ranks"
                )
        return self

    @property
    def contexts(self) -> tuple[int, int]:
        """The shortest and the longest."""
        return self.entries[0].context, self.entries[-1].context

    def fractions(self, tokens: int) -> tuple[float, ...] | None:
        """Shares for a prompt: its entry's, or between its neighbours (Section 4.3); None beyond the entries."""
        shortest, longest = self.contexts
        if not shortest <= tokens <= longest:
            return None
        contexts = [entry.context for entry in self.entries]
        by_rank = zip(*(entry.fractions for entry in self.entries), strict=True)
        return tuple(float(np.interp(tokens, contexts, shares)) for shares in by_rank)

    def nearest(self, tokens: int) -> TableEntry:
        """The entry whose context is closest."""
        return min(self.entries, key=lambda entry: abs(entry.context - tokens))

    def with_entry(self, entry: TableEntry) -> LookupTable:
        """This table with one entry more, in place of one for the same context."""
        others = [other for other in self.entries if other.context != entry.context]
        entries = tuple(sorted([*others, entry], key=lambda each: each.context))
        return self.model_copy(update={"entries": entries})


def load_table(path: str | Path, *, setting: str = SETTING) -> LookupTable:
    """Read and check a table."""
    return load_record(LookupTable, path, setting=setting, remedy=REMEDY)
