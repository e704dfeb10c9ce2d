"""What is left of a pass when all that was measured of it by itself is taken away, from times that are known."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megakv.costmodel.attention_time import LayerTimes
from megakv.costmodel.curves import Curve
from megakv.costmodel.shape import AttentionShape
from megakv.costmodel.stopwatch import Case, Cases, Pool
from megakv.planner.measure import meeting
from megakv.planner.measure.kernels import WEIGHT_WIDTH, Matrices
from megakv.planner.measure.links import fair
from megakv.planner.measure.meeting import LONG, METHODS, SHORT, Meeting
from tests.unit.costmodel.profiles import ideal

RING = 4
PRODUCT_S = 2e-3


def machine(**changes: Any) -> Any:
    weight = PRODUCT_S / WEIGHT_WIDTH**2
    return ideal(matmul=Curve(sizes=(1, 2), seconds=(weight, 2 * weight)), **changes)


def pool() -> Pool:
    return Pool(torch.float32, torch.device("cpu"), 1 << 12)


class Together:
    """A communicator of a ring that passes nothing on."""

    def __init__(self, **values: Any) -> None:
        self.mesh: Any = SimpleNamespace(cp_size=RING, device=torch.device("cpu"), **values)

    def device_tensor(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values)


def take(case: Case, seconds: float, *, in_turn: bool) -> None:
    """Each rank is the last one in turn, or one is alone."""
    late = 0.9 * seconds
    case.samples = ([seconds, late, seconds], [late, seconds, late]) if in_turn else ([seconds],)


@pytest.mark.parametrize("in_turn", [True, False])
def test_what_meeting_costs_behind_work(in_turn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lag, shared_s, wait_s = random.uniform(0, 1), random.uniform(1e-3, 1e-2), random.uniform(1e-3, 1e-2)
    extra = {method: random.uniform(1e-3, 1e-2) for method in METHODS}
    monkeypatch.setattr(meeting, "TrialLayer", lambda *args, **options: SimpleNamespace(run=print))
    comm, sums = Together(), Together(tp_size=3, shared_memory=False)
    curve = Curve(sizes=(4096, 16384), seconds=(3e-4, 9e-4))
    cases: Any = Cases(comm)  # type: ignore[arg-type]
    shape = AttentionShape(8, 8, 64, 64, 4)
    found: Any = Meeting(cases, comm, pool(), shape, Matrices(), [(sums, lambda: curve)])  # type: ignore[arg-type, list-item]
    profile = machine(collective=Curve.affine(1e-4, 1e9))
    behind = SHORT * len(Matrices().shapes) * PRODUCT_S * (1 + lag)
    alone = {
        method: LayerTimes(profile, found._shape, work).predict(METHODS[method]).seconds
        for method, work in found._works.items()
    }
    once = {method: behind + alone[method] + RING * extra[method] for method in METHODS}
    for method, case in found.methods.items():
        take(case, once[method], in_turn=in_turn)
    take(found.long, once["replicated"] + (LONG - SHORT) / SHORT * behind, in_turn=in_turn)
    take(found.shared, behind + 2 * shared_s, in_turn=in_turn)
    take(found.sums[0][2], behind + 5e-4 + wait_s, in_turn=in_turn)
    fields = found.fields(profile)
    assert fields["lag"] == pytest.approx(lag) and fields["share_s"] == pytest.approx(shared_s)
    assert fields["step_overhead_s"] == pytest.approx(extra)
    (sum_times,) = fields["sums"]
    assert (sum_times.ranks, sum_times.shared_memory, sum_times.seconds) == (3, False, curve)
    assert sum_times.wait_s == pytest.approx(wait_s, abs=2e-4)


def test_a_processor_gives_equal_shares() -> None:
    for transfer, compute in ((0.8, 1.0), (1.0, 0.3), (0.2, 0.5), (1.0, 1.0), (0.0, 0.9)):
        late, busy = fair(transfer, compute)
        assert 0 <= late <= transfer and 0 <= busy <= compute
        if late * busy < 1:
            assert (1 - late) / (1 - late * busy) >= 0.5 - 1e-9 and (1 - busy) / (1 - late * busy) >= 0.5 - 1e-9
    assert fair(0.2, 0.5) == (0.2, 0.5) and fair(1.0, 1.0) == (1.0, 1.0)
