"""Properties of a model, found once, that decide how its passes are computed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelTraits:
    """Properties of one engine's model; the defaults promise nothing."""

    last_layer: int | None = None
    """The layer whose results nobody but the output head reads, if the model has such a one."""
    few_rows: int = 1
    """Tokens of a pass up to which layers compute it as a step of decoding, on all ranks alike."""
    pairs: bool = False
    """Whether that multiplies bfloat16 by pairs where a sequence has many of them."""
    sliced_rows: int = 0
    """Tokens of a pass up to which slices, of all tokens on every rank, take less than shards of them do."""
    slices: bool | None = None
    """Whether what ranks are spared by slices of feed-forward layers is worth a message; None: they have no slices."""
    length_dependent: bool = False
    """Whether rotary frequencies follow the longest sequence of a pass."""
