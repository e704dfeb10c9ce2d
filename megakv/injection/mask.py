"""MegaKV's entry in transformers' mask interface: the mask stays a description, and is checked to be one we honour."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megakv.errors import MegaKVError


@dataclass(frozen=True)
class CausalMask:
    """A causal mask; with a window W, a query of slot s sees the keys in ``(s - W, s]``, else those in ``[0, s]``."""

    window: int | None = None


def _probe_slots(window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of slots around all edges that a causal or windowed mask has."""
    reach = window or 1
    slots = sorted({0, 1, 2, 3, reach - 1, reach, reach + 1, 2 * reach, 2 * reach + 3, 8191, 8192, 8193})
    queries, keys = np.meshgrid(slots, slots, indexing="ij")
    return torch.from_numpy(queries.reshape(-1).copy()), torch.from_numpy(keys.reshape(-1).copy())


def describe_mask(*, mask_function: Callable[..., Any], local_size: int | None = None, **kwargs: Any) -> CausalMask:
    """Entry for transformers' `AttentionMaskInterface`.

    transformers hands over a function of slots; a dense mask of a sharded sequence is never built. The function is
    evaluated at the edges of what `local_size` promises, so that a model with any other pattern (chunked, prefix,
    blockwise) is refused rather than silently computed wrongly.

    Raises
    ------
    MegaKVError
        If the pattern is neither causal nor a causal sliding window.
    """
    queries, keys = _probe_slots(local_size)
    zeros = torch.zeros_like(queries)
    try:
        seen = torch.as_tensor(mask_function(zeros, zeros, queries, keys)).expand_as(queries)
    except (IndexError, RuntimeError, TypeError) as error:
        raise MegaKVError("the model's attention mask is not a function of slots alone") from error
    expected = keys <= queries
    if local_size is not None:
        expected &= keys > queries - local_size
    if not torch.equal(seen.bool(), expected):
        raise MegaKVError(
            "the model's attention mask is neither causal nor a causal sliding window; "
            "MegaKV supports these two patterns only"
        )
    return CausalMask(window=local_size)
