"""What calling costs, from times that are known, and from real runs."""

import random

import pytest
import torch

from megakv.costmodel.dense import TokenTimes
from megakv.costmodel.hardware import CallTimes
from megakv.costmodel.stopwatch import Alone, Cases, Pool
from megakv.planner.measure.small_models import FEW, MANY, OFTEN, ONCE, SmallModels
from tests.measuring import count_calls
from tests.unit.costmodel.test_chain import attention_only
from tests.unit.planner.test_meeting import machine, pool

READ_S = 7e-3
NAMES = ("layer_s", "pass_s", "step_s", "begin_s")


def alone() -> Cases:
    return Cases(Alone(torch.device("cpu")))


def take(small: SmallModels, index: int, seconds: dict[str, float]) -> None:
    """Let the models, plain ones or MegaKV's, have taken so long."""

    def one_pass(layers: int) -> float:
        return layers * (READ_S + seconds["layer_s"]) + seconds["pass_s"]

    for layers in (FEW, MANY):
        small.passes[index][layers].samples = ([one_pass(layers)],)
        small.reading[layers].samples = ([layers * READ_S],)
    for tokens, case in small.generations[index].items():
        case.samples = ([seconds["begin_s"] + tokens * (one_pass(FEW) + seconds["step_s"])],)


def test_calls_are_told_apart() -> None:
    plain = {name: random.uniform(1e-3, 1e-2) for name in NAMES}
    added = {name: random.uniform(1e-3, 1e-2) for name in NAMES}
    small, profile = SmallModels(alone(), pool()), machine()
    own = {name: plain[name] + added[name] for name in NAMES}
    take(small, 0, plain)
    take(small, 1, own)
    found = small.fields(profile)
    # A little of it is what the layer's matrices take, and the output head.
    assert found["issue_s"] == pytest.approx(plain["layer_s"], rel=0.1)
    assert found["pass_s"] == pytest.approx(plain["pass_s"], rel=0.1)
    assert found["step_s"] == pytest.approx(plain["step_s"]) and found["begin_s"] == pytest.approx(plain["begin_s"])
    assert found["added"].model_dump() == pytest.approx(added)
    whole, model = profile.model_copy(update=found), attention_only(2, dense=1000)
    bare = whole.model_copy(update={"added": CallTimes()})
    ours, theirs, before = TokenTimes(whole, model), TokenTimes(bare, model), TokenTimes(profile, model)
    layer = before.before(0, 1) + found["issue_s"]
    assert theirs.before(0, 1) == pytest.approx(layer) and ours.before(0, 1) == pytest.approx(layer + added["layer_s"])
    assert theirs.end(1) - before.end(1) == pytest.approx(found["pass_s"])
    assert ours.end(1) - theirs.end(1) == pytest.approx(added["pass_s"])
    assert (ours.step_s, whole.begin_s + whole.added.begin_s) == pytest.approx((own["step_s"], own["begin_s"]))


def test_real_cases_and_what_they_cost() -> None:
    """Every case runs, under MegaKV too, and by the functions that are called every part costs something."""
    cases = alone()
    small = SmallModels(cases, Pool(torch.float32, torch.device("cpu"), 1 << 20))
    cases.run(0.0)
    for passes, generations in zip(small.passes, small.generations, strict=True):
        for case in (*passes.values(), *generations.values(), *small.reading.values()):
            assert case.seconds > 0
            # What one call takes on any machine: a microsecond each.
            case.samples = ([1e-6 * count_calls(case.call)],)
        assert passes[FEW].seconds < passes[MANY].seconds
        assert passes[FEW].seconds < generations[ONCE].seconds < generations[OFTEN].seconds
    found = small.fields(machine())
    added = found["added"]
    assert min(found["pass_s"], found["begin_s"], added.layer_s, added.pass_s, added.begin_s) > 0 <= found["step_s"]
