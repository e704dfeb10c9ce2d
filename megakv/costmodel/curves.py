"""Measured times as functions of size: linear between the points, proportional beyond the last."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, NamedTuple, Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

TILED_ROWS = 16
"""From so many rows on a kernel's time is that of its tiles, which what a call costs by itself no longer hides."""

NO_TIME = 1e-15

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _check_ascending(name: str, axis: Sequence[float]) -> None:
    if any(a >= b for a, b in zip(axis, axis[1:], strict=False)):
        raise ValueError(f"{name} = {list(axis)} must ascend")


def _bracket(axis: Sequence[float], x: float) -> tuple[int, int, float]:
    """Neighbouring indices of `x` on an ascending axis and the weight of the second; the ends are held."""
    if x <= axis[0] or len(axis) == 1:
        return 0, 0, 0.0
    if x >= axis[-1]:
        return len(axis) - 1, len(axis) - 1, 0.0
    high = bisect_right(axis, x)
    return high - 1, high, (x - axis[high - 1]) / (axis[high] - axis[high - 1])


class Curve(BaseModel):
    """Seconds over a size, through measured points; beyond them latency and bandwidth stay the same."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sizes: tuple[Positive, ...] = Field(min_length=2)  # Ascending, positive: bytes or elements.
    seconds: tuple[Positive, ...] = Field(min_length=2)  # Time at each size.

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_ascending("sizes", self.sizes)
        if len(self.sizes) != len(self.seconds):
            raise ValueError(f"{len(self.sizes)} sizes with {len(self.seconds)} seconds")
        return self

    @classmethod
    def affine(cls, latency: float, bandwidth: float, *, up_to: float = 1e9) -> Curve:
        """``latency + size / bandwidth``: the curve of a data sheet."""
        return cls(sizes=(1.0, up_to), seconds=(latency + 1.0 / bandwidth, latency + up_to / bandwidth))

    @classmethod
    def instant(cls) -> Curve:
        """What takes no time to speak of."""
        return cls(sizes=(1.0, 2.0), seconds=(NO_TIME, 2 * NO_TIME))

    def at(self, size: float) -> float:
        """Seconds for a size; 0 for nothing."""
        if size <= 0:
            return 0.0
        if size > self.sizes[-1]:
            return self.seconds[-1] + (size - self.sizes[-1]) / self.bandwidth
        low, high, weight = _bracket(self.sizes, size)
        return self.seconds[low] + weight * (self.seconds[high] - self.seconds[low])

    @property
    def latency(self) -> float:
        return self.seconds[0]

    @property
    def bandwidth(self) -> float:
        """Size per second that large sizes approach."""
        gained = self.seconds[-1] - self.seconds[-2]
        if gained <= 0:
            return self.sizes[-1] / self.seconds[-1]
        return (self.sizes[-1] - self.sizes[-2]) / gained


class AttentionTable(BaseModel):
    """Seconds of one kernel call by rows and keys, at one head dimension and number of heads."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    # ``flash`` (fused) or ``math`` (matrix products, for soft caps and position biases); ``sdpa`` in older files alone.
    kernel: str = Field(pattern="^(flash|math|sdpa)$")
    head_dim: int = Field(gt=0)  # Head dimension, query heads, and query heads that share a KV head.
    heads: int = Field(gt=0)
    group: int = Field(gt=0)
    rows: tuple[Positive, ...] = Field(min_length=1)  # Axes: query rows and keys of a block that every row sees wholly.
    keys: tuple[Positive, ...] = Field(min_length=1)
    # ``seconds[row][key]``; the rows of large blocks may stop early, where measuring takes too long.
    seconds: tuple[tuple[Positive, ...], ...]
    causal: Curve  # Seconds of a causal square, over its pairs (rows times rows).

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_ascending("rows", self.rows)
        _check_ascending("keys", self.keys)
        if len(self.seconds) != len(self.rows) or any(not 0 < len(s) <= len(self.keys) for s in self.seconds):
            raise ValueError(f"seconds must have {len(self.rows)} rows of 1 to {len(self.keys)} times")
        return self

    @property
    def call_s(self) -> float:
        """Seconds of the smallest call: what does not grow with heads."""
        return self.seconds[0][0]

    def _line(self, row: int, keys: float) -> float:
        times = self.seconds[row]
        axis = self.keys[: len(times)]
        if keys > axis[-1]:
            return times[-1] * keys / axis[-1]
        low, high, weight = _bracket(axis, keys)
        return times[low] + weight * (times[high] - times[low])

    def block(self, heads: float, rows: float, keys: float) -> float:
        """Seconds of a call with every pair visible; 0 for an empty one."""
        if rows <= 0 or keys <= 0:
            return 0.0
        low, high, weight = _bracket(self.rows, rows)
        seconds = self._line(low, keys)
        if weight:
            first, last = seconds, self._line(high, keys)
            seconds = first + weight * (last - first)
            if self.rows[low] >= TILED_ROWS:
                # Kernels take larger, faster tiles from some number of rows on: until then time stays proportional.
                seconds = max(seconds, min(first * rows / self.rows[low], last))
        return self._scaled(seconds * max(1.0, rows / self.rows[-1]), heads)

    def square(self, heads: float, rows: float) -> float:
        return self._scaled(self.causal.at(rows * rows), heads) if rows > 0 else 0.0

    def _scaled(self, seconds: float, heads: float) -> float:
        return self.call_s + max(0.0, seconds - self.call_s) * heads / self.heads

    @property
    def flops(self) -> float:
        """Floating-point operations per second of the largest block, four per pair and head dimension."""
        pairs, seconds = max(
            (rows * keys, times[index])
            for rows, times in zip(self.rows, self.seconds, strict=True)
            for index, keys in enumerate(self.keys[: len(times)])
        )
        return 4.0 * self.heads * self.head_dim * pairs / seconds


class RaggedCall(NamedTuple):
    """What a call of attention to ragged heads takes: ``call_s + heads * head_s + tokens * token_s``, of all heads."""

    call_s: float
    head_s: float
    token_s: float
    jitter: float = 0.0  # As in `RaggedTable`.

    def seconds(self, heads: float, tokens: float) -> float:
        return self.call_s + heads * self.head_s + tokens * self.token_s


class RaggedTable(BaseModel):
    """Seconds of one call of decode attention to ragged heads by heads and the tokens that each keeps."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    head_dim: int = Field(gt=0)  # Head dimension, and query heads that share a KV head.
    group: int = Field(gt=0)
    heads: tuple[int, ...] = Field(min_length=2)  # Axes: KV heads, and tokens of each of them.
    tokens: tuple[int, ...] = Field(min_length=2)
    # ``seconds[heads][tokens]``; calls of many heads may stop early, where measuring takes too long.
    seconds: tuple[tuple[Positive, ...], ...]
    # How much longer the last of all ranks takes than each by itself, where all have equally much to do.
    jitter: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_ascending("heads", self.heads)
        _check_ascending("tokens", self.tokens)
        if len(self.seconds) != len(self.heads) or any(not 1 < len(s) <= len(self.tokens) for s in self.seconds):
            raise ValueError(f"seconds must have {len(self.heads)} rows of 2 to {len(self.tokens)} times")
        return self

    @cached_property
    def call(self) -> RaggedCall:
        """The plane through the measured times that is nearest to them all, relative to each."""
        from scipy.optimize import nnls

        cells = [
            (heads, heads * tokens, time)
            for heads, times in zip(self.heads, self.seconds, strict=True)
            for tokens, time in zip(self.tokens, times, strict=False)
        ]
        heads, tokens, times = np.array(cells).T
        factors, _ = nnls(np.stack([np.ones_like(times), heads, tokens], axis=1) / times[:, None], np.ones_like(times))
        call_s, head_s, token_s = factors.tolist()
        return RaggedCall(call_s, head_s, token_s, self.jitter)
