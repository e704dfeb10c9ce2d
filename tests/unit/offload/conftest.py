"""Engines that offload."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import pytest

import megakv
from megakv.offload.auto import Auto
from megakv.offload.link import Direction, EmulatedLink, Move, Transfer
from megakv.offload.prices import LayerPrices
from megakv.offload.rates import Rates


@pytest.fixture(autouse=True)
def no_buffer_in_flight_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer is not used again while a transfer of an emulated link into it is under way."""
    start, under_way = EmulatedLink.start, WeakKeyDictionary[Transfer, list[tuple[int, int]]]()

    def started(link: EmulatedLink, direction: Direction, moves: Sequence[Move]) -> Transfer:
        copies = [copy for move in moves for copy in move.copies()] if direction == "in" else []
        spans = [(copy.device, copy.device + copy.nbytes) for copy in copies]
        for other, taken in under_way.items():
            assert other.done or all(high <= begin or end <= low for low, high in spans for begin, end in taken), (
                "a buffer is used again while a transfer into it is under way"
            )
        transfer = start(link, direction, moves)
        if direction == "in":
            under_way[transfer] = spans
        return transfer

    monkeypatch.setattr(EmulatedLink, "start", started)


SETTINGS = {"enabled": True, "host_gb": 0.05, "page_kib": 8, "chunk_tokens": 16}


@pytest.fixture
def offloaded(alone: None) -> Iterator[Callable[..., Any]]:
    """A function that makes an engine with keys and values offloaded; settings beside ``enabled`` by name."""
    engines = []

    def make(model: Any, form: str = "as_stored", **settings: Any) -> Any:
        section = {"weights": {"format": form}, "offload": {**SETTINGS, **settings}}
        engine = megakv.init_inference(model, {"dtype": "fp32", "megakv": section})
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.destroy()


@pytest.fixture
def fixed_costs(monkeypatch: pytest.MonkeyPatch) -> LayerPrices:
    """A machine on which every way to treat a token has its share, whatever this one measures."""
    costs = LayerPrices(
        kv_s=3.0,
        activation_s=1.0,
        recompute_s=1.3,
        attend_s=1.0,
        host_attend_s=2.0,
        disk_kv_s=3.0,
        disk_activation_s=1.0,
    )
    measured = Rates.prices

    def layer(self: Rates, *args: Any, **options: Any) -> LayerPrices:
        measured(self, *args, **options)
        return costs

    monkeypatch.setattr(Rates, "prices", layer)
    monkeypatch.setattr(Rates, "learn", lambda self, *args: None)
    # The last plan is the one that treats tokens in most ways.
    monkeypatch.setattr(Auto, "choose", lambda self, predicted, tokens: list(predicted)[-1])
    return costs
