"""The registry of compression methods."""

from __future__ import annotations

from dataclasses import fields

from megakv.fairkv.config import FairKVConfig
from megakv.fairkv.scoring import CompressionMethod
from megakv.fairkv.scoring_ada_snapkv import AdaSnapKV
from megakv.fairkv.scoring_h2o import H2O
from megakv.fairkv.scoring_headkv import HeadKV
from megakv.fairkv.scoring_pyramidkv import PyramidKV
from megakv.fairkv.scoring_snapkv import SnapKV
from megakv.fairkv.scoring_streaming_llm import StreamingLLM

METHODS: dict[str, type[CompressionMethod]] = {
    method.name: method for method in (StreamingLLM, SnapKV, PyramidKV, H2O, AdaSnapKV, HeadKV)
}


def make_method(config: FairKVConfig, layers: int, kv_heads: int) -> CompressionMethod:
    """The method that a configuration asks for.

    Raises
    ------
    ValueError
        If a setting is not one of this method's, or does not fit the model or the budget.
    """
    kind = METHODS[config.method]
    known = [entry.name for entry in fields(kind) if not entry.name.startswith("_")]  # type: ignore[arg-type]
    given = config.method_settings()
    for name in given:
        if name not in known:
            raise ValueError(
                f"megakv.fairkv.{name} is not a setting of method {config.method!r}, which has: {', '.join(known)}"
            )
    method = kind(**given)
    method.bind(layers, kv_heads)
    if config.budget is not None and 1 < config.budget < method.least:
        raise ValueError(
            f"megakv.fairkv.budget = {config.budget:g} tokens per head is below the {method.least} that "
            f"{config.method!r} keeps in any case (its window, or its sinks and one more); raise it, or lower those"
        )
    return method
