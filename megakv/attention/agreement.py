"""Whether a kernel computes what the reference does."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["difference"]


def difference(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tolerance: float) -> str:
    """What differs by more than the tolerance, relative to 1 + the expected size; empty if nothing does.

    Parameters
    ----------
    actual, expected : tuple of Tensor
        Outputs and log-sum-exps; the expected ones in float64.
    tolerance : float
    """
    for name, got, want in zip(("output", "log-sum-exp"), actual, expected, strict=True):
        if got.shape != want.shape:
            return f"its {name} has the shape {list(got.shape)} instead of {list(want.shape)}"
        if not torch.allclose(got.double(), want, rtol=tolerance, atol=tolerance):
            return f"its {name} differs from the reference by more than {tolerance}"
    return ""
