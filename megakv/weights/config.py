"""Section ``megakv.weights``: which format weights are in."""

from __future__ import annotations

from typing import Annotated

from megakv.base.sections import OneOf, Section


def formats() -> tuple[str, ...]:
    """Names of all formats that plain weights can be brought into, and the one that leaves them as they are."""
    from megakv.weights.formats import settings

    return settings()


class WeightsConfig(Section):
    """The form in which ranks hold and multiply weights."""

    format: Annotated[str, OneOf(formats)] = "as_stored"
    """``as_stored`` keeps what the checkpoint has, blocks of GGUF files and quantised weights too. The others round a
    plain checkpoint's weights as they load, **not exact**: docs/weights.md."""
