"""The fitted rule of Appendix D: recovered from points that obey it, and the published constants' contradiction."""

import math
import random
from pathlib import Path

import pytest

from megakv.forward.policy_fit import FitPoint, PolicyFit, empirical_rule, load_fit
from megakv.planner.measure.policy_points import accuracies, fit_constants, grid
from tests.unit.costmodel.profiles import fingerprint

PUBLISHED = (-1.059, 1.145, 12.112)


def point(new: int, cached: int, advantage: float) -> FitPoint:
    """Pass-KV is the faster by that much; the slower where it is negative."""
    return FitPoint(new=new, cached=cached, pass_kv_s=1 + max(0.0, -advantage), pass_q_s=1 + max(0.0, advantage))


def points_of(constants: tuple[float, float, float], count: int = 300) -> list[FitPoint]:
    found = []
    for _ in range(count):
        total = 2 ** random.uniform(8, 17)
        new = max(1, round(total * 10 ** random.uniform(-2.5, 0)))
        cached = max(0, round(total) - new)
        found.append(point(new, cached, 0.02 * empirical_rule(constants, new, cached)))
    return found


def make_fit(**changes: object) -> PolicyFit:
    values: dict = {
        "alpha": 0.5,
        "beta": 1.5,
        "gamma": 1.0,
        "fingerprint": fingerprint(),
        "ring_size": 2,
        "heads": 8,
        "kv_heads": 2,
        "head_dim": 64,
        "accuracy": 1.0,
        "clear_accuracy": 1.0,
        "points": (point(10, 10, 0.5),),
    }
    return PolicyFit(**{**values, **changes})


def test_published_constants_contradict_the_text() -> None:
    """The text prefers pass-KV for a full prefill of 128K tokens, and above a miss rate of 5% of it."""
    assert empirical_rule(PUBLISHED, 128_000, 0) < 0
    assert empirical_rule(PUBLISHED, 12_800, 115_200) < 0
    assert empirical_rule(PUBLISHED, 128_000, 0) == pytest.approx(-1.059 * math.log(128_000) + 12.112)


@pytest.mark.parametrize("constants", [(0.7, 1.9, 1.2), (-1.0, 1.1, 11.0), (0.4, 0.9, -2.0)])
def test_a_line_between_the_points_is_found(constants: tuple[float, float, float]) -> None:
    points = points_of(constants)
    found = fit_constants(points)
    accuracy, clear = accuracies(found, points)
    assert accuracy > 0.95
    assert clear > 0.97
    # The line h = 0 is the same: constants are known up to a common factor.
    scale = constants[1] / found[1]
    assert scale > 0
    assert found[0] * scale == pytest.approx(constants[0], abs=0.15)
    fresh = points_of(constants)
    assert accuracies(found, fresh)[1] > 0.95


def test_large_differences_outweigh_small_ones() -> None:
    """Noise below 1% on the wrong side moves the rule less than clear differences do."""
    constants = (0.7, 1.9, 1.2)
    points = points_of(constants)
    noise = [point(p.new, p.cached, -0.002 * math.copysign(1, p.advantage)) for p in points]
    found = fit_constants([*points, *noise])
    assert accuracies(found, points)[1] > 0.95


@pytest.mark.parametrize("advantage", [0.3, -0.3])
def test_one_method_always_faster(advantage: float) -> None:
    points = [point(new, 5000, advantage) for new in (10, 100, 1000)]
    found = fit_constants(points)
    assert all(math.isfinite(value) for value in found)
    assert accuracies(found, points) == (1.0, 1.0)
    assert (empirical_rule(found, 50_000, 100) > 0) == (advantage > 0)


def test_single_and_equal_points() -> None:
    assert all(math.isfinite(value) for value in fit_constants([point(10, 0, 0.1)]))
    assert all(math.isfinite(value) for value in fit_constants([point(10, 0, 0.0), point(20, 5, 0.0)]))
    with pytest.raises(ValueError, match="no .T, P. point was measured: allow more --seconds"):
        fit_constants([])


def test_accuracy_counts_clear_points_apart() -> None:
    points = [point(10, 0, 0.5), point(10, 0, -0.01)]
    assert accuracies((0.0, 0.0, 1.0), points) == (0.5, 1.0)
    assert accuracies((0.0, 0.0, -1.0), points) == (0.5, 0.0)


def test_grid() -> None:
    wanted = grid((1024, 100), 4)
    assert (1024, 0) in wanted and (100, 0) in wanted
    assert all(new >= 8 and new + cached in (1024, 100) for new, cached in wanted)
    assert wanted == sorted(wanted)


def test_saved_and_read_back(tmp_path: Path) -> None:
    fit = make_fit(points=tuple(points_of((0.7, 1.9, 1.2), 5)))
    path = tmp_path / "fit.json"
    fit.save(path)
    again = load_fit(str(path))
    assert again == fit
    assert again.h(300, 700) == pytest.approx(0.5 * math.log(300) + 1.5 * math.log(0.3) + 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not valid JSON"),
        ('{"format": "megakv hardware profile"}', "is not a megakv policy fit"),
        ('{"format": "megakv policy fit"}', "Field required"),
    ],
)
def test_broken_fits(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "fit.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_fit(str(path), setting="megakv.context_parallel.fit")
    assert "megakv.context_parallel.fit = " in str(caught.value)
    assert "megakv fit-policy --json FILE" in str(caught.value)
