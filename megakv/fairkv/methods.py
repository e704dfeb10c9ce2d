"""The compression methods, and the registry from which the JSON, the tests and the tables take them."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

import numpy as np
import torch
from pydantic import Field, PrivateAttr, field_validator, model_validator
from torch import Tensor

from megakv.base.errors import CombinationError
from megakv.base.json_files import read_json
from megakv.base.registry import Registry
from megakv.fairkv.budgets import FloatArray, HeadBudgets, equal, pyramid, shared, weighted
from megakv.fairkv.method import EVERYTHING, CompressionMethod, Segment


class StreamingLLM(CompressionMethod):
    """Attention sinks and a recent window (Xiao et al. 2024, Section 3.2)."""

    name: ClassVar[str] = "streaming_llm"
    sinks: int = Field(4, ge=0)
    """First tokens that are kept."""

    @property
    def least(self) -> int:
        return self.sinks + 1

    @property
    def moved(self) -> int:
        # Positions within the cache, as the paper has them.
        return self.sinks

    def scores(self, segment: Segment, mass_KS: Tensor | None) -> Tensor:
        score = segment.order.float()
        score[segment.order < self.sinks] = torch.inf
        return score.expand(segment.k_KSD.shape[0], -1)


class SnapKV(CompressionMethod):
    """Attention from an observation window at the end of the prompt, pooled over neighbours (Li et al. 2024).

    The window tells what matters where it holds the question. Where the question comes after compression, what the
    whole prompt ever looked at sharply tells more: ``observe = "prompt"`` with ``reduce = "peak"``.
    """

    name: ClassVar[str] = "snapkv"
    window: int = Field(32, ge=1)
    """Last tokens, whose queries are observed, and which are always kept."""
    observe: Literal["window", "prompt"] = "window"
    """Whose queries are observed: the window's, or all, which costs as much as the prompt's own attention."""
    reduce: Literal["mean", "peak"] = "mean"
    """What counts of their attention. For a question that comes later: ``peak`` over the ``prompt``."""
    pool: int = Field(7, ge=1)
    """Neighbouring tokens that share their scores, an odd number. 1 pools nothing."""
    pooling: Literal["max", "mean"] = "max"
    """What they share: the highest of their scores, or the mean."""

    @field_validator("pool")
    @classmethod
    def _check_pool(cls, value: int) -> int:
        if value % 2 == 0:
            raise ValueError("allowed: odd numbers, 1 for no pooling")
        return value

    @property
    def observed(self) -> int:
        return self.window if self.observe == "window" else EVERYTHING

    @property
    def peaks(self) -> bool:
        return self.reduce == "peak"

    @property
    def pool_radius(self) -> int:
        return self.pool // 2

    @property
    def pools_mean(self) -> bool:
        return self.pooling == "mean"

    @property
    def least(self) -> int:
        return self.window

    def protected(self, tokens: int) -> int:
        return self.window


class PyramidKV(SnapKV):
    """SnapKV's scores under budgets that fall linearly over the layers (Cai et al. 2024, Section 4.2)."""

    name: ClassVar[str] = "pyramidkv"
    decay: float = Field(20.0, ge=1)
    """Mean budget over that of the last layer, beside the window."""

    def budgets(self, layer: int, layers: int, kv_heads: int, *, tokens: int, length: int) -> HeadBudgets:
        own = pyramid(tokens, layer, layers, length=length, least=min(self.window, length), decay=self.decay)
        return equal(own, kv_heads)


class H2O(CompressionMethod):
    """Heavy hitters by the attention accumulated over all queries, and recent tokens (Zhang et al. 2023, Algorithm 1).

    Every query against every key is computed a second time, so this costs as much as the prompt's own attention.
    """

    name: ClassVar[str] = "h2o"
    recent: float = Field(0.5, ge=0, le=1)
    """Share of what is kept that goes to the last tokens."""
    per_query: bool = False
    """Count the mean over the queries that saw a token, not the sum: the first tokens are seen by most."""
    observed: ClassVar[int] = EVERYTHING
    least: ClassVar[int] = 2

    def protected(self, tokens: int) -> int:
        return int(self.recent * tokens)

    def scores(self, segment: Segment, mass_KS: Tensor | None) -> Tensor:
        assert mass_KS is not None
        return mass_KS / (segment.length - segment.order) if self.per_query else mass_KS


class AdaSnapKV(SnapKV):
    """SnapKV's scores compete for one pool of tokens of all heads of a layer (Feng et al. 2024, Algorithm 1)."""

    name: ClassVar[str] = "ada_snapkv"
    uneven: ClassVar[bool] = True
    safeguard: float = Field(0.2, ge=0, le=1)
    """Share of the mean budget beside the window that every head keeps of its own best."""

    def budgets(self, layer: int, layers: int, kv_heads: int, *, tokens: int, length: int) -> HeadBudgets:
        return shared(tokens, kv_heads, self.safeguard, min(self.window, length))


class HeadKV(SnapKV):
    """SnapKV's scores under budgets that a file of importances fixes beforehand (Fu et al. 2024, Section 3.2)."""

    name: ClassVar[str] = "headkv"
    uneven: ClassVar[bool] = True
    importance: str | None = None
    """JSON file whose ``budgets`` (or ``importance``) are numbers ``[layer][KV head]``: a head's share of the pool, in
    proportion. A profile of ``megakv fairkv profile`` is one."""
    spread: float = Field(1.2, ge=1)
    """All tokens over those that are divided by importance. The rest is divided evenly."""
    _weights: FloatArray = PrivateAttr(default_factory=lambda: np.zeros((0, 0)))

    @model_validator(mode="after")
    def _check_importance(self) -> Self:
        if self.importance is None:
            raise CombinationError(
                "needs",
                "megakv.fairkv.method = 'headkv' needs megakv.fairkv.importance: a JSON file with the importance of "
                "every KV head, such as megakv fairkv profile writes",
            )
        return self

    def bind(self, layers: int, kv_heads: int) -> None:
        assert self.importance is not None
        self._weights = read_importance(self.importance, layers, kv_heads)

    def budgets(self, layer: int, layers: int, kv_heads: int, *, tokens: int, length: int) -> HeadBudgets:
        own = weighted(tokens, self._weights, length=length, least=min(self.window, length), spread=self.spread)[layer]
        return HeadBudgets(own, int(own.sum()))


def read_importance(path: str, layers: int, kv_heads: int) -> FloatArray:
    """``[layers, K]`` importance of heads; a `ValueError` if the file holds no such numbers, or another model's."""
    setting = f"megakv.fairkv.importance = {path!r}"
    values = read_json(path, setting)
    table = values.get("importance", values.get("budgets")) if isinstance(values, dict) else None
    try:
        weights = np.array(table, dtype=np.float64)
    except (TypeError, ValueError):
        weights = np.zeros(0)
    if weights.ndim != 2:
        raise ValueError(f"{setting} holds no numbers 'budgets' [layer][KV head]")
    if weights.shape != (layers, kv_heads):
        raise CombinationError(
            "foreign",
            f"megakv.fairkv.importance = {path!r} is of another model: {weights.shape[0]} layers of "
            f"{weights.shape[1]} KV heads, this one has {layers} of {kv_heads}",
        )
    if not np.isfinite(weights).all() or (weights < 0).any() or weights.sum() == 0:
        raise ValueError(f"{setting}: 'budgets' must be finite numbers, none below 0 and not all 0")
    return weights


METHODS: Registry[type[CompressionMethod]] = Registry(
    "compression method",
    {method.name: method for method in (StreamingLLM, SnapKV, PyramidKV, H2O, AdaSnapKV, HeadKV)},
)
