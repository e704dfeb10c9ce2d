"""What the page shows of a server, as JSON: load, memory, times, kept documents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from megakv.serving.http.served_model import ServedModel
from megakv.serving.loop import ServingLoop
from megakv.tracking.measurements import percentiles

BEGINNING_TOKENS = 64
"""Of a kept document that are shown."""


def status(loop: ServingLoop, served: ServedModel) -> dict[str, Any]:
    """A snapshot."""
    values = asdict(loop.stats())
    ttft, token = values.pop("ttft_s"), values.pop("token_s")
    return {
        "model": served.name,
        "context": served.context,
        **values,
        **_tails("ttft_s", ttft),
        **_tails("token_s", token),
        "documents": [
            {
                "id": document.id,
                "tokens": document.tokens,
                "tier": document.tier,
                "used_s_ago": document.used_s_ago,
                "hits": document.hits,
                "beginning": served.tokenizer.decode(
                    list(document.beginning[:BEGINNING_TOKENS]), skip_special_tokens=True
                ),
            }
            for document in loop.documents()
        ],
    }


def _tails(name: str, seconds: Sequence[float]) -> dict[str, float]:
    return {key.replace("/", "_"): value for key, value in percentiles(name, seconds).items()}
