"""Small models, computed as large ones are: slices of their linears, and blocks of their prompts' rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import megakv.forward.planning
from megakv.injection import linears, prompt_layer


@contextmanager
def as_large(section: dict[str, Any]) -> Iterator[None]:
    """While an engine is made, a few tokens are a long prompt; if it decodes by ``tensor``, messages cost nothing, and
    no weight is too small.
    """
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(prompt_layer, LEAST_ROWS=3, ROWS=9))
        if section.get("context_parallel", {}).get("decode") == "tensor":
            stack.enter_context(patch.object(megakv.forward.planning, "worth_bytes", lambda _: 0))
            stack.enter_context(patch.object(linears, "LEAST_WEIGHT", 0))
        yield
