"""Section ``megakv.weights``: which format weights are in."""

from __future__ import annotations

from typing import Literal

from megakv.base.sections import Section


class WeightsConfig(Section):
    """The form in which ranks hold and multiply weights."""

    format: Literal["as_stored", "int8", "q4_1", "fp8"] = "as_stored"
    """``as_stored`` keeps what the checkpoint has, blocks of GGUF files and quantised weights too. The others round a
    plain checkpoint's weights as they load, **not exact**: docs/weights.md."""
