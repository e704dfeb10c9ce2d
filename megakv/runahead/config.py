"""Section ``megakv.runahead``: the chain of KV-Runahead."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from megakv.runahead.partition import check_partition
from megakv.sections import Section

if TYPE_CHECKING:
    from megakv.config import ContextParallelConfig


class RunaheadConfig(Section):
    """How the chain of ``"prefill": "runahead"`` cuts a prompt, and where its KV ends."""

    kv: Literal["sharded", "last"] = "sharded"
    """``sharded``: each rank keeps the keys and values of its own part. ``last``: the last rank keeps all of them, and
    decodes alone."""

    partition: str | list[int | float] = "auto"
    """Tokens of each rank: ``even``, fractions or token counts, or ``auto``: from `table` where it is given, else from
    the cost model where ``context_parallel.profile`` is, else even."""

    table: str | None = None
    """Lookup table that ``megakv search-partition`` wrote."""

    accept_foreign_table: bool = False
    """Whether `table` may come from another model, machine or world."""

    chunk_tokens: int = Field(1024, ge=1)
    """Tokens that are forwarded at a time: fewer overlap more hops, more cost fewer merges."""

    @field_validator("partition", mode="before")
    @classmethod
    def validate_partition(cls, value: Any) -> Any:
        """A name, or a list of numbers."""
        named = value in ("auto", "even") if isinstance(value, str) else False
        listed = isinstance(value, list | tuple) and all(type(part) in (int, float) for part in value)
        if not named and not listed:
            raise ValueError("allowed: 'auto', 'even', or a list of numbers, one for each context-parallel rank")
        return value if named else list(value)


def check_runahead(runahead: RunaheadConfig, parallel: ContextParallelConfig, source: str) -> None:
    """Refuse what contradicts the mesh or the methods.

    Parameters
    ----------
    runahead : RunaheadConfig
    parallel : ContextParallelConfig
        Of the same run.
    source : str
        Where they were read, for messages.

    Raises
    ------
    ValueError
        Naming the setting, its value and what is allowed.
    """
    if not isinstance(runahead.partition, str):
        try:
            check_partition(runahead.partition, parallel.size)
        except ValueError as error:
            raise ValueError(f"{source}: {error}") from None
    if runahead.table is not None and runahead.partition != "auto":
        raise ValueError(
            f"{source}: megakv.runahead.table = {runahead.table!r} is for megakv.runahead.partition = 'auto', "
            f"which is {runahead.partition!r}"
        )
    if runahead.kv == "last" and parallel.prefill != "runahead":
        raise ValueError(
            f"{source}: megakv.runahead.kv = 'last' needs megakv.context_parallel.prefill = 'runahead', "
            f"which is {parallel.prefill!r}"
        )
    if runahead.kv == "last" and parallel.decode != "auto":
        raise ValueError(
            f"{source}: megakv.context_parallel.decode = {parallel.decode!r} contradicts megakv.runahead.kv = 'last', "
            "with which the last rank decodes alone; allowed: 'auto'"
        )
