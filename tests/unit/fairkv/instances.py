"""Budgets that are new in every run."""

from __future__ import annotations

import numpy as np

RANDOM = np.random.default_rng(0)
"""Seeded anew before every test."""


def budgets(heads: int, sigma: float = 0.8) -> list[float]:
    """Of one layer: log-normal, whole numbers with many ties, or with heads that keep nothing."""
    kind = RANDOM.integers(4)
    if kind == 0:
        return [float(value) for value in RANDOM.integers(1, 8, heads)]
    values = np.exp(sigma * RANDOM.standard_normal(heads)) * 100
    if kind == 1:
        values[RANDOM.integers(heads)] = 0.0
    return values.tolist()


def skewed(layers: int, heads: int, sigma: float = 0.8) -> list[list[float]]:
    """Of a model: log-normal."""
    return (np.exp(sigma * RANDOM.standard_normal((layers, heads))) * 100).tolist()
