"""How long the exchange is that overlap is measured with."""

from typing import Any

import pytest
import torch

from megakv.costmodel.measure.kernels import TableCases
from megakv.costmodel.measure.links import LEAST_OVERLAP_BYTES, OverlapCases
from megakv.costmodel.measure.stopwatch import Cases, Pool
from megakv.costmodel.shape import AttentionShape


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
    kernels = TableCases(
        AttentionShape(2, 2, 16, 16, 4), Pool(torch.float32, torch.device("cpu"), 1 << 20), 1e9, longest_s
    )
    calls: list[Any] = []
    cases: Any = type("Calls", (Cases,), {"add": lambda self, *key, call: calls.append((key, call))})(comm)
    OverlapCases(comm, kernels, 3e-4, bandwidth, longest_s).add(cases)
    (_, first), (key, fewer) = calls[0], calls[1]
    first()
    assert comm.sent == [pytest.approx(expected, rel=1e-3)]
    # The shorter computation takes a bit more than half of the exchange.
    assert key[1] * 3e-4 == pytest.approx(0.6 * expected / bandwidth, rel=0.2)
    fewer()
    assert len(comm.sent) == 1
