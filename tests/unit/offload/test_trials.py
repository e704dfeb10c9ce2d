"""The choice between plans: each is tried, the fastest stays, and noise does not drive it away."""

import random

import pytest

from megakv.offload.trials import BLOCK, ENOUGH, RETRY, PlanTrials


def play(trials: PlanTrials, true: dict[str, float], steps: int, *, predicted: dict[str, float] | None = None,
         tokens: int = 1000, noise: float = 0.0, seed: int = 0) -> list[str]:  # fmt: skip
    """Steps on a machine where plans take `true` seconds."""
    generator = random.Random(seed)
    chosen = []
    for _ in range(steps):
        name = trials.choose(predicted or true, tokens)
        measured = true[name] * (1 + noise * generator.uniform(-1, 1))
        trials.observe(name, tokens=tokens, predicted_s=(predicted or true)[name], measured_s=measured)
        chosen.append(name)
    return chosen


def test_the_fastest_wins_where_predictions_are_wrong() -> None:
    true = {"stream": 1.0, "kvpr": 1.1, "cpu_rank": 0.8}
    predicted = {"stream": 1.0, "kvpr": 0.9, "cpu_rank": 1.2}
    chosen = play(PlanTrials(), true, 200, predicted=predicted, noise=0.05)
    tried = len(true) * BLOCK * -(-ENOUGH // (BLOCK - 1))
    assert set(chosen[:tried]) == set(true)
    late = chosen[tried:]
    assert late.count("cpu_rank") >= len(late) - 2 * BLOCK * len(late) // RETRY


def test_of_equal_plans_the_plainest_stays() -> None:
    chosen = play(PlanTrials(), {"stream": 1.0, "kvpr": 0.995}, RETRY - 1, noise=0.0)
    assert set(chosen[-20:]) == {"stream"}
    trials = PlanTrials()
    changes = play(trials, {"stream": 1.0, "kvpr": 1.0}, 300, noise=0.1, seed=3)
    late = changes[30:]
    assert sum(one != other for one, other in zip(late, late[1:], strict=False)) < 40


def test_hopeless_plans_are_not_tried() -> None:
    assert "kvpr" not in play(PlanTrials(), {"stream": 1.0, "kvpr": 2.0}, 2 * RETRY)


def test_without_trials_predictions_decide() -> None:
    true = {"stream": 1.0, "kvpr": 0.9}
    assert set(play(PlanTrials(explore=False), true, 20)) == {"kvpr"}


def test_a_prediction_is_corrected_by_steps_of_about_that_size() -> None:
    trials = PlanTrials()
    play(trials, {"stream": 1.3}, 10, predicted={"stream": 1.0}, tokens=1000)
    assert trials.correction("stream", 1200) == pytest.approx(1.3)
    assert trials.correction("kvpr", 1200) == pytest.approx(1.3)
    assert trials.correction("stream", 5000) == 1.0
