"""What tests of layers in compiled calls share."""

from typing import Any

import pytest

from megakv.attention.layer import load_layer
from megakv.attention.token_layer import WholeLayersCall
from megakv.weights.products import Products


@pytest.fixture(autouse=True)
def products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Products:
    """How products are computed: not as was measured, but as a test says with `parametrize`, or by few rows alone."""
    found: Products = getattr(request, "param", Products())
    monkeypatch.setattr(Products, "measured", classmethod(lambda cls, dtype: found))
    return found


@pytest.fixture
def calls(alone: None, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For every layer that was computed so, how many were in the call."""
    if load_layer()[0] is None:
        pytest.skip(f"no compiled kernel: {load_layer()[1]}")
    taken: list[int] = []
    call = WholeLayersCall.__call__

    def noted(self: WholeLayersCall, *arguments: Any) -> Any:
        out, moments = call(self, *arguments)
        taken.extend([len(moments)] * len(moments))
        return out, moments

    monkeypatch.setattr(WholeLayersCall, "__call__", noted)
    return taken
