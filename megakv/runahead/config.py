"""Section ``megakv.runahead``: the chain of KV-Runahead."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from megakv.base.errors import CombinationError, repeated
from megakv.base.partition import check_partition
from megakv.base.sections import Section


class RunaheadConfig(Section):
    """How the chain of ``"prefill": "runahead"`` cuts a prompt, and where its KV ends."""

    kv: Literal["sharded", "last"] = "sharded"
    """Which ranks keep the prompt's keys and values in the end: each those of its own part, or the last all of them,
    which then decodes alone."""

    partition: str | list[int | float] = "auto"
    """How the chain cuts a prompt: ``auto``, ``even``, or a number for each CP rank. Numbers are fractions that sum to
    1, or tokens that sum to the prompt. ``auto`` takes ``table``, else the cost model where
    ``context_parallel.profile`` is given, else even parts: docs/runahead.md."""

    table: str | None = None
    """Lookup table that ``megakv search-partition --table`` wrote."""

    accept_foreign_table: bool = False
    """Whether ``table`` may be of another model, machine or world."""

    chunk_tokens: int = Field(1024, ge=1)
    """Tokens that go down the chain at a time: fewer overlap more hops, more need fewer merges."""

    @field_validator("partition", mode="before")
    @classmethod
    def validate_partition(cls, value: Any) -> Any:
        """A name, or a list of numbers."""
        named = value in ("auto", "even") if isinstance(value, str) else False
        listed = isinstance(value, list | tuple) and all(type(part) in (int, float) for part in value)
        if not named and not listed:
            raise ValueError("allowed: 'auto', 'even', or a list of numbers, one for each context-parallel rank")
        return value if named else list(value)

    def check(self, size: int, *, prefill: str, decode: str, source: str) -> None:
        """Refuse what contradicts the context-parallel degree or the methods of the section ``context_parallel``."""
        if not isinstance(self.partition, str):
            try:
                check_partition(self.partition, size)
            except ValueError as error:
                raise repeated(f"{source}: {error}", error) from None
        if self.table is not None and self.partition != "auto":
            raise CombinationError(
                "one",
                f"{source}: megakv.runahead.table = {self.table!r} is for megakv.runahead.partition = 'auto', "
                f"which is {self.partition!r}",
            )
        if self.kv == "last" and prefill != "runahead":
            raise CombinationError(
                "needs",
                f"{source}: megakv.runahead.kv = 'last' needs megakv.context_parallel.prefill = 'runahead', "
                f"which is {prefill!r}",
            )
        if self.kv == "last" and decode != "auto":
            raise CombinationError(
                "one",
                f"{source}: megakv.context_parallel.decode = {decode!r} contradicts megakv.runahead.kv = 'last', "
                "with which the last rank decodes alone; allowed: 'auto'",
            )
