"""Section ``megakv.context_parallel`` of the JSON."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megakv.attention.methods import decode_methods, prefill_methods
from megakv.base.sections import OneOf, Section


class ContextParallelConfig(Section):
    """Section ``megakv.context_parallel``."""

    size: int = Field(1, ge=1)
    """Context-parallel ranks; times ``tensor_parallel.tp_size`` it must be the number of ranks started."""

    prefill: Annotated[str, OneOf(lambda: ("auto", *prefill_methods()))] = "auto"
    """How the tokens of a prompt attend across ranks: docs/methods.md."""

    decode: Annotated[str, OneOf(lambda: ("auto", *decode_methods()))] = "auto"
    """The same for fewer than 2N new tokens in each sequence, as in decoding."""

    policy: Literal["cost", "alg1", "alg5", "fitted"] = "cost"
    """How ``auto`` chooses: docs/methods.md#auto."""

    profile: str | None = None
    """File that ``megakv profile --json`` wrote. ``alg1`` and ``alg5`` need it, ``cost`` does better with it."""

    fit: str | None = None
    """File that ``megakv fit-policy --json`` wrote. ``fitted`` needs it."""

    accept_foreign_profile: bool = False
    """Whether ``profile`` and ``fit`` may come from another machine, world or model."""
