"""HeadKV: SnapKV with fixed budgets by the importance of heads."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from megakv.fairkv.budgets import FloatArray, HeadBudgets, weighted
from megakv.fairkv.scoring import at_least
from megakv.fairkv.scoring_snapkv import SnapKV


@dataclass
class HeadKV(SnapKV):
    """SnapKV's scores under budgets that a file of importances fixes beforehand (Fu et al. 2024, Section 3.2).

    Parameters
    ----------
    importance : str
        JSON file whose ``budgets`` (or ``importance``) are numbers ``[layer][KV head]``; a head's share of the pool is
        in proportion. A profile of `megakv fairkv-profile` is one.
    spread : float
        The pool holds one over this of all tokens; the rest is divided evenly.
    """

    name: ClassVar[str] = "headkv"
    importance: str | None = None
    spread: float = 1.2
    _weights: FloatArray = field(default_factory=lambda: np.zeros((0, 0)), repr=False)

    def bind(self, layers: int, kv_heads: int) -> None:
        """See `CompressionMethod`."""
        super().bind(layers, kv_heads)
        at_least("spread", self.spread, 1)
        if self.importance is None:
            raise ValueError(
                "megakv.fairkv.method = 'headkv' needs megakv.fairkv.importance: a JSON file with the importance of "
                "every KV head, such as megakv fairkv-profile writes"
            )
        self._weights = read_importance(self.importance, layers, kv_heads)

    def budgets(self, layer: int, layers: int, kv_heads: int, *, tokens: int, length: int) -> HeadBudgets:
        """What the head's importance gives it."""
        own = weighted(tokens, self._weights, length=length, least=min(self.window, length), spread=self.spread)[layer]
        return HeadBudgets(own, int(own.sum()))


def read_importance(path: str, layers: int, kv_heads: int) -> FloatArray:
    """``[layers, K]`` importance of heads.

    Raises
    ------
    ValueError
        If the file cannot be read, holds no such numbers, or belongs to another model.
    """
    setting = f"megakv.fairkv.importance = {path!r}"
    try:
        values: Any = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{setting} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{setting} is not valid JSON: {error}") from error
    table = values.get("importance", values.get("budgets")) if isinstance(values, dict) else None
    try:
        weights = np.array(table, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{setting} holds no numbers 'budgets' [layer][KV head]") from error
    if weights.ndim != 2:
        raise ValueError(f"{setting} holds no numbers 'budgets' [layer][KV head]")
    if weights.shape != (layers, kv_heads):
        raise ValueError(
            f"{setting} is of another model: {weights.shape[0]} layers of {weights.shape[1]} KV heads, "
            f"this one has {layers} of {kv_heads}"
        )
    if not np.isfinite(weights).all() or (weights < 0).any() or weights.sum() == 0:
        raise ValueError(f"{setting}: 'budgets' must be finite numbers, none below 0 and not all 0")
    return weights
