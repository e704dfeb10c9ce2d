"""Slices of small models' linears: cut wherever those of large ones are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import megakv.injection.linears
import megakv.planning


@contextmanager
def all_slices(section: dict[str, Any]) -> Iterator[None]:
    """While an engine is made that decodes by ``tensor``, messages cost nothing, and no weight is too small."""
    if section.get("context_parallel", {}).get("decode") != "tensor":
        yield
        return
    every = patch.object(megakv.injection.linears, "LEAST_WEIGHT", 0)
    with patch.object(megakv.planning, "worth_bytes", lambda _: 0), every:
        yield
