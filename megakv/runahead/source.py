"""Where an engine's partitions come from: fixed by the user, looked up and interpolated, predicted, or even."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from megakv.base.errors import CombinationError
from megakv.base.partition import Partition, check_partition, even, explicit, from_fractions
from megakv.costmodel.shape import ModelShape
from megakv.distributed.agreement import Agreement
from megakv.distributed.comm import Communicator
from megakv.runahead.config import RunaheadConfig
from megakv.runahead.table import SETTING, ChainIdentity, LookupTable, load_table

logger = logging.getLogger(__name__)

KEPT = 1024


@dataclass
class PartitionSource:
    """The partition of every sequence of every prompt; the same on all ranks."""

    size: int  # Context-parallel degree.
    given: str | Sequence[float] = "auto"  # ``auto``, ``even``, or a user's fractions or token counts.
    table: LookupTable | None = None  # For ``auto``: what was searched.
    # For ``auto``: the cost model's partition of so many new tokens behind so many cached ones.
    predict: Callable[[int, int], Partition] | None = None
    speaks: bool = False  # Whether this rank logs.
    _warned: bool = False

    def __post_init__(self) -> None:
        self._once = lru_cache(KEPT)(self._auto)

    @classmethod
    def from_config(
        cls,
        settings: RunaheadConfig,
        *,
        comm: Communicator,
        model: ModelShape | None,
    ) -> PartitionSource:
        """Read what the section ``megakv.runahead`` names. Every rank must call it."""
        source = cls(comm.mesh.cp_size, speaks=comm.mesh.rank == 0)
        source.use(settings.partition)
        if settings.partition == "auto" and settings.table is not None:
            source.table = Agreement(comm).same_file(SETTING, partial(load_table, settings.table))
            check_chain(source.table, settings, comm, model)
        return source

    def use(self, partition: str | Sequence[float]) -> None:
        """From now on, go by this: ``auto``, ``even``, fractions or token counts."""
        if not isinstance(partition, str):
            check_partition(partition, self.size)
        self.given = partition

    def sizes(self, new: int, cached: int = 0) -> Partition:
        """Each rank's part of a sequence's new tokens, behind those that the ranks hold of it already."""
        if not isinstance(self.given, str):
            return explicit(self.given, new, self.size)
        return even(new, self.size) if self.given == "even" or self.size == 1 else self._once(new, cached)

    def _auto(self, new: int, cached: int) -> Partition:
        """KVR-S where the table has the prompt, KVR-P between its entries (Section 4.2), else the cost model."""
        # Tables are of prompts without a past: cached tokens make every new one dearer, which calls for evener parts.
        if self.table is not None and not (cached and self.predict):
            fractions = self.table.fractions(new)
            if fractions is not None:
                return from_fractions(fractions, new)
            self._warn(self.table, new)
        if self.predict is not None:
            return self.predict(new, cached)
        if self.table is not None:
            return from_fractions(self.table.nearest(new).fractions, new)
        return even(new, self.size)

    def _warn(self, table: LookupTable, new: int) -> None:
        if self.speaks and not self._warned:
            instead = "the cost model's partition is" if self.predict else "the shares of the nearest entry are"
            shortest, longest = table.contexts
            logger.warning(
                "%s covers %d to %d tokens, the prompt has %d: %s used for such prompts; "
                "megakv search-partition --contexts %d adds it",
                SETTING, shortest, longest, new, instead, new,
            )  # fmt: skip
        self._warned = True


def check_chain(table: LookupTable, settings: RunaheadConfig, comm: Communicator, model: ModelShape | None) -> None:
    """Refuse a table of another chain. Every rank must call it."""
    assert settings.table is not None
    check_size(table, settings.table, comm.mesh.cp_size)
    if settings.accept_foreign_table:
        return
    named = f"{SETTING} = {settings.table!r}"
    remedy = "search here with megakv search-partition --table FILE, or set megakv.runahead.accept_foreign_table = true"
    if model is None:
        raise ValueError(f"{named}: whether it is of this model is not known, for its config names no sizes; {remedy}")
    here = ChainIdentity.of(comm, model, kv=settings.kv, chunk_tokens=settings.chunk_tokens)
    if differences := table.chain.differences(here):
        raise CombinationError("foreign", f"{named} was searched elsewhere: {'; '.join(differences)}; {remedy}")


def check_size(table: LookupTable, path: str, size: int) -> None:
    """Refuse a table for another number of context-parallel ranks."""
    if table.chain.ranks != size:
        raise CombinationError(
            "foreign",
            f"{SETTING} = {path!r} has partitions for {table.chain.ranks} context-parallel ranks, here are {size}; "
            f"search here with megakv search-partition, or set megakv.context_parallel.size = {table.chain.ranks}",
        )
