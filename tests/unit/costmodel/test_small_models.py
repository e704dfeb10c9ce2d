"""What calling costs, from times that are known, and from real runs."""

import random

import pytest
import torch

from megakv.costmodel.dense import TokenTimes
from megakv.costmodel.measure.small_models import FEW, MANY, OFTEN, ONCE, OWN, PLAIN, READING, SmallModelCases
from megakv.costmodel.measure.stopwatch import Alone, Cases, Pool, Stopwatch, Times
from megakv.costmodel.plain import PlainTimes
from tests.measuring import until_it_holds
from tests.unit.costmodel.test_chain import attention_only
from tests.unit.costmodel.test_meeting import machine, pool

READ_S = 7e-3
NAMES = ("layer_s", "pass_s", "step_s", "begin_s")


def known(kind: str, seconds: dict[str, float]) -> dict[tuple[object, ...], tuple[list[float], ...]]:
    def one_pass(layers: int) -> float:
        return layers * (READ_S + seconds["layer_s"]) + seconds["pass_s"]

    found = {(kind, "pass", layers): one_pass(layers) for layers in (FEW, MANY)}
    found |= {(READING, layers): layers * READ_S for layers in (FEW, MANY)}
    for tokens in (ONCE, OFTEN):
        found[kind, "tokens", tokens] = seconds["begin_s"] + tokens * (one_pass(FEW) + seconds["step_s"])
    return {key: ([value],) for key, value in found.items()}


def test_calls_are_told_apart() -> None:
    plain = {name: random.uniform(1e-3, 1e-2) for name in NAMES}
    added = {name: random.uniform(1e-3, 1e-2) for name in NAMES}
    measured, profile = SmallModelCases(pool()), machine()
    own = {name: plain[name] + added[name] for name in NAMES}
    found = measured.fields(profile, Times({**known(PLAIN, plain), **known(OWN, own)}))
    # A little of it is what the layer's matrices take, and the output head.
    assert found["issue_s"] == pytest.approx(plain["layer_s"], rel=0.1)
    assert found["pass_s"] == pytest.approx(plain["pass_s"], rel=0.1)
    assert found["step_s"] == pytest.approx(plain["step_s"]) and found["begin_s"] == pytest.approx(plain["begin_s"])
    assert found["added"].model_dump() == pytest.approx(added)
    whole, model = profile.model_copy(update=found), attention_only(2, dense=1000)
    ours, theirs, before = TokenTimes(whole, model), TokenTimes(whole, model, plain=True), TokenTimes(profile, model)
    layer = before.before(0, 1) + found["issue_s"]
    assert theirs.before(0, 1) == pytest.approx(layer) and ours.before(0, 1) == pytest.approx(layer + added["layer_s"])
    assert theirs.end(1) - before.end(1) == pytest.approx(found["pass_s"])
    assert ours.end(1) - theirs.end(1) == pytest.approx(added["pass_s"])
    assert (ours.step_s, ours.begin_s) == pytest.approx((own["step_s"], own["begin_s"]))
    plainly = PlainTimes(whole, model)
    assert plainly.prefill(9, generating=True) - plainly.prefill(9) == pytest.approx(plain["begin_s"])


def test_real_runs() -> None:
    """Every case runs, under MegaKV too, and generations take longer than passes."""
    cases = Cases(Stopwatch(Alone(torch.device("cpu"))))
    small = SmallModelCases(Pool(torch.float32, torch.device("cpu"), 1 << 20))
    small.add(cases)

    def measured() -> None:
        times = cases.run(0.1)
        for kind in (PLAIN, OWN):
            assert 0 < times[kind, "pass", FEW] < times[kind, "tokens", OFTEN]
        found = small.fields(machine(), times)
        assert 0 < found["begin_s"] < 5 and found["step_s"] >= 0 and found["added"].begin_s >= 0

    until_it_holds(measured)
