"""Section ``megakv.fairkv``: compression of the cache to per-head budgets, and where heads are placed."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import InitErrorDetails

from megakv.base.errors import CombinationError
from megakv.base.sections import OneOf, Section
from megakv.cache.shares import Copies
from megakv.fairkv.method import CompressionMethod
from megakv.fairkv.methods import METHODS


class FairKVConfig(Section):
    """What is kept of a prompt's keys and values once it is read, and on which ranks.

    The fields of the registered methods are further keys.
    """

    model_config = ConfigDict(extra="allow")

    method: Annotated[str, OneOf(lambda: tuple(METHODS))] = "ada_snapkv"
    """Which tokens of a prompt the cache keeps: docs/fairkv.md#compression."""

    budget: float | None = Field(None, gt=0, strict=True, allow_inf_nan=False)
    """What a KV head keeps on average: up to 1 a fraction of the prompt's tokens, above 1 their number. ``null`` keeps
    all, which alone is exact."""

    min_tokens: int = Field(128, ge=2)
    """A row is compressed from this many new tokens on. A shorter one, such as a question, is kept whole."""

    decode_interval: int | None = Field(None, ge=1)
    """After so many further tokens everything that a sequence's heads hold comes back within the ``budget``, a number
    of tokens, however long the answer: no head ever holds more than its budget and this. ``null`` keeps all that comes
    after a prompt: docs/fairkv.md#eviction-while-decoding."""

    mapping: str | None = None
    """File that ``megakv fairkv map`` wrote: which tensor-parallel rank holds which KV heads of each layer. Works with
    and without a ``budget``."""

    copies: Copies = "tokens"
    """What ranks that hold copies of a KV head divide: the ``tokens`` of every sequence, or the ``batch``, of which
    each copy serves some sequences, as in the paper: docs/fairkv.md#copies-that-divide-the-batch."""

    @field_validator("budget")
    @classmethod
    def _check_budget(cls, value: float | None) -> float | None:
        if value is not None and value > 1 and value != int(value):
            raise ValueError("allowed: a fraction such as 0.25, or a whole number of tokens such as 1024")
        return value

    @classmethod
    def settings(cls) -> dict[str, FieldInfo]:
        """The section's own, and those of all methods that are registered by now."""
        of_methods = {name: field for kind in METHODS.values() for name, field in kind.model_fields.items()}
        return super().settings() | of_methods

    @model_validator(mode="after")
    def _check_use(self) -> Self:
        known, own = self.settings(), self.model_extra or {}
        unknown = [name for name in own if name not in known]
        if unknown:
            details = [InitErrorDetails(type="extra_forbidden", loc=(name,), input=own[name]) for name in unknown]
            raise ValidationError.from_exception_data(type(self).__name__, details)
        given = [name for name in known if name in self.model_fields_set - {"budget", "mapping", "copies"}]
        if self.budget is None and given:
            raise CombinationError(
                "needs",
                f"megakv.fairkv.{given[0]} is given, but nothing is compressed without megakv.fairkv.budget: set it "
                "to a fraction such as 0.25, or a number of tokens such as 1024",
            )
        if self.mapping is None and self.copies != "tokens":
            raise CombinationError(
                "needs",
                f"megakv.fairkv.copies = {self.copies!r} is given, but no KV head has a copy without "
                "megakv.fairkv.mapping: set it to a file that megakv fairkv map --copies C wrote",
            )
        if self.decode_interval is not None and self.budget is not None and self.budget <= 1:
            raise CombinationError(
                "needs",
                f"megakv.fairkv.decode_interval = {self.decode_interval} with megakv.fairkv.budget = {self.budget:g}: "
                "what holds for an answer of any length is a number of tokens, not a fraction; set the budget to one, "
                "such as 1024",
            )
        method = self._make_method()
        if self.budget is not None and 1 < self.budget < method.least:
            raise CombinationError(
                "room",
                f"megakv.fairkv.budget = {self.budget:g} tokens per head is below the {method.least} that "
                f"{self.method!r} keeps in any case (its window, or its sinks and one more); raise it, or lower those",
            )
        return self

    def _make_method(self) -> CompressionMethod:
        kind = METHODS[self.method]
        given = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        for name in given:
            if name not in kind.model_fields:
                raise CombinationError(
                    "needs",
                    f"megakv.fairkv.{name} is not a setting of method {self.method!r}, which has: "
                    f"{', '.join(kind.model_fields)}",
                )
        return kind(**given)

    def make_method(self, layers: int, kv_heads: int) -> CompressionMethod:
        """The method that this asks for; a `ValueError` if a setting does not fit the model."""
        method = self._make_method()
        method.bind(layers, kv_heads)
        return method
