"""How long the exchange is that overlap is measured with."""

from typing import Any

import pytest
import torch

from megakv.costmodel.stopwatch import Cases
from megakv.planner.measure.links import LEAST_OVERLAP_BYTES, overlap


class Sizes:
    """A communicator that notes how much is passed on, and cases that note what it is given."""

    def __init__(self) -> None:
        self.mesh = type("Mesh", (), {"device": torch.device("cpu")})()
        self.sent: list[int] = []

    def shift(self, send: torch.Tensor, receive: torch.Tensor, **_: Any) -> Any:
        assert send.numel() == receive.numel()
        self.sent.append(send.numel())
        return type("Done", (), {"wait": lambda self: None})()


@pytest.mark.parametrize(
    ("bandwidth", "longest_s", "expected"),
    [
        # Shaped links let a quarter of a megabyte pass in a burst: 2 ms of 1 Gbit/s would be no more than that.
        (1.2e8, 0.5, LEAST_OVERLAP_BYTES),
        (2e9, 0.5, 2e9 * 10 * 3e-4),
        (1e6, 0.5, 5e5),
        (2e9, 1e-3, 4e6),
    ],
)
def test_exchanges_are_longer_than_a_burst(bandwidth: float, longest_s: float, expected: float) -> None:
    comm: Any = Sizes()
    computed: list[int] = []
    calls: list[Any] = []
    cases: Any = type("Calls", (Cases,), {"add": lambda self, call: calls.append(call)})(comm)
    limits = {"unit_s": 3e-4, "bandwidth": bandwidth, "longest_s": longest_s}
    overlap(cases, comm, lambda: computed.append(1), **limits)
    calls[0]()
    assert comm.sent == [pytest.approx(expected, rel=1e-3)]
    # The shorter computation takes a bit more than half of the exchange.
    calls[1]()
    assert len(computed) * 3e-4 == pytest.approx(0.6 * expected / bandwidth, rel=0.2)
    assert len(comm.sent) == 1
