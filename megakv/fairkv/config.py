"""Section ``megakv.fairkv``: compression of the cache to per-head budgets, and where heads are placed."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from megakv.sections import Section

GENERAL = ("method", "budget", "min_tokens", "mapping")
WITHOUT_BUDGET = ("budget", "mapping")


class FairKVConfig(Section):
    """What is kept of a prompt's keys and values once it is read, and on which ranks."""

    method: Literal["streaming_llm", "snapkv", "pyramidkv", "h2o", "ada_snapkv", "headkv"] = "ada_snapkv"
    """How tokens are chosen."""

    budget: float | None = Field(None, gt=0, strict=True, allow_inf_nan=False)
    """What a KV head keeps on average: up to 1 a fraction of the prompt's tokens, above 1 their number. None compresses
    nothing."""

    min_tokens: int = Field(128, ge=2)
    """A row is compressed from this many new tokens on; a shorter one, a question, is kept whole."""

    window: int | None = None
    """Last tokens of the prompt that are observed and kept (snapkv, pyramidkv, ada_snapkv, headkv; 32)."""

    observe: Literal["window", "prompt"] | None = None
    """Whether the window's queries are observed or all of the prompt's (the same methods; window)."""

    reduce: Literal["mean", "peak"] | None = None
    """What counts of the observed attention (the same methods; mean). Where the question is not known yet, the peak
    over the whole prompt, looks at the ``pool`` tokens before a query aside, finds what a question may ask for."""

    pool: int | None = None
    """Neighbouring tokens that share the highest of their scores (the same methods; 7)."""

    sinks: int | None = None
    """First tokens that are kept (streaming_llm; 4)."""

    recent: float | None = None
    """Fraction of what is kept that goes to the last tokens (h2o; 0.5)."""

    safeguard: float | None = None
    """Fraction of the mean budget beside the window that every head keeps (ada_snapkv; 0.2)."""

    decay: float | None = None
    """Mean budget over that of the last layer (pyramidkv; 20)."""

    importance: str | None = None
    """JSON file with the importance of every KV head (headkv)."""

    spread: float | None = None
    """All tokens over those divided by importance (headkv; 1.2)."""

    mapping: str | None = None
    """Head mapping that ``megakv fairkv-map`` wrote: which tensor-parallel rank holds which KV heads of each layer. The
    tokens of a head on several ranks are divided among these."""

    @field_validator("budget")
    @classmethod
    def _check_budget(cls, value: float | None) -> float | None:
        if value is not None and value > 1 and value != int(value):
            raise ValueError("allowed: a fraction such as 0.25, or a whole number of tokens such as 1024")
        return value

    @model_validator(mode="after")
    def _check_use(self) -> Self:
        given = [
            name for name in FairKVConfig.model_fields if name in self.model_fields_set and name not in WITHOUT_BUDGET
        ]
        if self.budget is None and given:
            raise ValueError(
                f"{given[0]} is given, but nothing is compressed without megakv.fairkv.budget: set it to a fraction "
                "such as 0.25, or a number of tokens such as 1024"
            )
        return self

    def method_settings(self) -> dict[str, Any]:
        """The settings of the method that were given."""
        return {
            name: value
            for name in sorted(self.model_fields_set)
            if name not in GENERAL and (value := getattr(self, name)) is not None
        }
