"""Section ``megakv.weights``: which format weights are in."""

from __future__ import annotations

from typing import Annotated

from megakv.base.sections import OneOf, Section
from megakv.weights.formats import AS_STORED, settings


class WeightsConfig(Section):
    """The form in which ranks hold and multiply weights."""

    format: Annotated[str, OneOf(settings)] = AS_STORED
    """``as_stored`` keeps what the checkpoint has, blocks of GGUF files and quantised weights too. The others round a
    plain checkpoint's weights as they load, **not exact**: docs/weights.md."""
