"""What is left of a pass when all that was measured of it by itself is taken away, from times that are known."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megakv.costmodel.attention_time import LayerTimes
from megakv.costmodel.curves import Curve
from megakv.costmodel.measure.kernels import WEIGHT_WIDTH, CurveCases, Matrices
from megakv.costmodel.measure.links import fair
from megakv.costmodel.measure.meeting import LONG, METHODS, SHORT, MeetingCases
from megakv.costmodel.measure.stopwatch import Pool, Times
from megakv.costmodel.shape import AttentionShape
from tests.unit.costmodel.profiles import ideal

RING = 4
PRODUCT_S = 2e-3


def machine(**changes: Any) -> Any:
    weight = PRODUCT_S / WEIGHT_WIDTH**2
    return ideal(matmul=Curve(sizes=(1, 2), seconds=(weight, 2 * weight)), **changes)


def pool() -> Pool:
    return Pool(torch.float32, torch.device("cpu"), 1 << 12)


def mesh(**values: Any) -> Any:
    return SimpleNamespace(mesh=SimpleNamespace(cp_size=RING, device=torch.device("cpu"), **values))


def test_what_meeting_costs_behind_work() -> None:
    lag, shared_s, wait_s = random.uniform(0, 1), random.uniform(1e-3, 1e-2), random.uniform(1e-3, 1e-2)
    extra = {method: random.uniform(1e-3, 1e-2) for method in METHODS}
    tensor_parallel = mesh(tp_size=3, shared_memory=False)
    meeting = MeetingCases(mesh(), pool(), AttentionShape(8, 8, 64, 64, 4), [tensor_parallel], Matrices())
    profile = machine(collective=Curve.affine(1e-4, 1e9))
    behind = SHORT * len(Matrices().shapes) * PRODUCT_S * (1 + lag)
    known = {}
    for method, work in meeting._works.items():
        alone = LayerTimes(profile, meeting._shape, work).predict(METHODS[method]).seconds
        known["behind", method, SHORT] = behind + alone + RING * extra[method]
    known["behind", "replicated", LONG] = known["behind", "replicated", SHORT] + (LONG - SHORT) / SHORT * behind
    known["behind", "share", SHORT] = behind + 2 * shared_s
    curve = CurveCases(("sum", 3, False), (4096, 16384), lambda size: lambda: None)
    known |= {(curve.name, 4096): 3e-4, (curve.name, 16384): 9e-4}
    known["behind", ("sum", 3, False), SHORT] = behind + 5e-4 + wait_s
    # Each rank is the last one in turn.
    times = Times(
        {key: ([value, 0.9 * value, value], [0.9 * value, value, 0.9 * value]) for key, value in known.items()}
    )
    found = meeting.fields(profile, times)
    assert found["lag"] == pytest.approx(lag) and found["share_s"] == pytest.approx(shared_s)
    assert found["step_overhead_s"] == pytest.approx(extra)
    times = Times({key: ([value],) for key, value in known.items()})
    (sums,) = meeting.sum_times(times, [curve])
    assert (sums.ranks, sums.shared_memory) == (3, False)
    assert sums.seconds.at(16384) == 9e-4 and sums.wait_s == pytest.approx(wait_s, abs=2e-4)


def test_a_processor_gives_equal_shares() -> None:
    for transfer, compute in ((0.8, 1.0), (1.0, 0.3), (0.2, 0.5), (1.0, 1.0), (0.0, 0.9)):
        late, busy = fair(transfer, compute)
        assert 0 <= late <= transfer and 0 <= busy <= compute
        if late * busy < 1:
            assert (1 - late) / (1 - late * busy) >= 0.5 - 1e-9 and (1 - busy) / (1 - late * busy) >= 0.5 - 1e-9
    assert fair(0.2, 0.5) == (0.2, 0.5) and fair(1.0, 1.0) == (1.0, 1.0)
