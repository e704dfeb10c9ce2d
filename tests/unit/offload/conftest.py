"""Engines that offload."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import megakv
from megakv.costmodel.offload import LayerCosts
from megakv.offload.auto import Auto
from megakv.offload.costs import OffloadCosts

SETTINGS = {"enabled": True, "host_gb": 0.05, "page_kib": 8, "chunk_tokens": 16}


@pytest.fixture
def offloaded(alone: None) -> Iterator[Callable[..., Any]]:
    """A function that makes an engine with keys and values offloaded; settings beside ``enabled`` by name."""
    engines = []

    def make(model: Any, **settings: Any) -> Any:
        engine = megakv.init_inference(model, {"dtype": "fp32", "megakv": {"offload": {**SETTINGS, **settings}}})
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.destroy()


@pytest.fixture
def fixed_costs(monkeypatch: pytest.MonkeyPatch) -> LayerCosts:
    """A machine on which every way to treat a token has its share, whatever this one measures."""
    costs = LayerCosts(
        kv_s=3.0, activation_s=1.0, recompute_s=1.3, host_attend_s=2.0, disk_kv_s=3.0, disk_activation_s=1.0
    )
    measured = OffloadCosts.layer

    def layer(self: OffloadCosts, *args: Any, **options: Any) -> LayerCosts:
        measured(self, *args, **options)
        return costs

    monkeypatch.setattr(OffloadCosts, "layer", layer)
    monkeypatch.setattr(OffloadCosts, "learn", lambda self, *args: None)
    # The last plan is the one that treats tokens in most ways.
    monkeypatch.setattr(OffloadCosts, "warmed_up", True)
    monkeypatch.setattr(Auto, "choose", lambda self, predicted, tokens: list(predicted)[-1])
    return costs
