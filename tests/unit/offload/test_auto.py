"""The choice between plans: each is tried, the fastest stays, noise does not drive it away, and auto are paid for."""

import random

import pytest

from megakv.offload.auto import FRESH, Auto

Times = dict[str, float]


def play(
    auto: Auto,
    true: Times,
    steps: int,
    *,
    predicted: Times | None = None,
    tokens: int = 1000,
    noise: float = 0.0,
    seed: int = 0,
) -> list[str]:
    """Steps on a machine where plans take `true` seconds; what a step took is known after the next one is chosen."""
    generator = random.Random(seed)
    predicted = predicted or true
    chosen: list[str] = []
    for _ in range(steps):
        chosen.append(auto.going_on(tokens) or auto.choose(predicted, tokens))
        if len(chosen) > 1:
            name = chosen[-2]
            # The first step of a plan ends what the plan before began.
            if chosen[-3:-2] == [name]:
                auto.observe(name, tokens=tokens, measured_s=true[name] * (1 + noise * generator.uniform(-1, 1)))
    return chosen


def cost(chosen: list[str], true: Times) -> float:
    """Time of some steps over that of as many by the fastest plan."""
    return sum(true[name] for name in chosen) / (len(chosen) * min(true.values()))


def test_the_fastest_wins_where_predictions_are_wrong() -> None:
    true = {"stream": 1.0, "kvpr": 1.1, "cpu_rank": 0.8}
    chosen = play(Auto(), true, 300, predicted={"stream": 1.0, "kvpr": 0.9, "cpu_rank": 1.2}, noise=0.05)
    assert set(chosen) == set(true)
    late = chosen[100:]
    assert late.count("cpu_rank") >= 0.9 * len(late)


@pytest.mark.parametrize("seed", range(6))
def test_a_long_generation_is_within_two_per_cent_of_the_best_plan(seed: int) -> None:
    generator = random.Random(seed)
    true = {name: generator.uniform(0.7, 3.0) for name in ("stream", "kvpr", "chunked", "cpu_rank", "all")}
    # The first predictions err by up to 15%; noise is what a shared machine shows.
    predicted = {name: seconds * generator.uniform(0.87, 1.15) for name, seconds in true.items()}
    chosen = play(Auto(), true, 2000, predicted=predicted, noise=0.05, seed=seed)
    assert cost(chosen, true) < 1.02


def test_sixty_four_tokens_pay_for_no_more_than_they_save() -> None:
    true = {"stream": 1.0, "kvpr": 1.25, "chunked": 1.03, "cpu_rank": 1.6, "all": 1.4}
    chosen = play(Auto(), true, 64)
    assert "chunked" in chosen and cost(chosen, true) <= 1 + 1.5 / 64


def test_of_equal_plans_the_plainest_stays() -> None:
    chosen = play(Auto(), {"stream": 1.0, "kvpr": 0.995}, 64, noise=0.0)
    assert set(chosen[-20:]) == {"stream"}
    changes = play(Auto(), {"stream": 1.0, "kvpr": 1.0}, 300, noise=0.1, seed=3)
    late = changes[30:]
    assert sum(one != other for one, other in zip(late, late[1:], strict=False)) < 40


def test_a_plan_that_was_lucky_at_first_is_left_again() -> None:
    auto, chosen = Auto(), list[str]()
    for step in range(120):
        chosen.append(auto.going_on(1000) or auto.choose({"stream": 1.0, "kvpr": 1.0}, 1000))
        if step:
            seconds = 1.0 if chosen[-2] == "stream" else 0.9 if step < 20 else 1.05
            auto.observe(chosen[-2], tokens=1000, measured_s=seconds)
    assert set(chosen[15:20]) == {"kvpr"}
    # Not only when plans that lost are looked at again.
    assert chosen[45:60].count("stream") > 10


def test_a_machine_that_slows_down_drives_no_plan_away() -> None:
    auto, true = Auto(), {"stream": 1.0, "kvpr": 1.25, "cpu_rank": 1.2}
    play(auto, true, 500)
    loaded = {name: 1.6 * seconds for name, seconds in true.items()}
    chosen = play(auto, loaded, 500, predicted=true)
    assert chosen.count("stream") > 470


def test_a_plan_that_a_disturbance_drove_away_comes_back() -> None:
    auto = Auto()
    calm, disturbed = {"stream": 1.0, "cpu_rank": 0.8}, {"stream": 1.0, "cpu_rank": 1.6}
    assert set(play(auto, calm, 60)[-20:]) == {"cpu_rank"}
    assert play(auto, disturbed, 40, predicted=calm)[20:].count("stream") > 12
    assert set(play(auto, calm, FRESH + 40)[-20:]) == {"cpu_rank"}


def test_without_auto_predictions_decide() -> None:
    true = {"stream": 1.0, "kvpr": 0.9}
    assert set(play(Auto(explore=False), true, 20)) == {"kvpr"}


def test_a_prediction_goes_by_steps_of_about_that_size() -> None:
    auto = Auto()
    play(auto, {"stream": 1.3}, 10, predicted={"stream": 1.0}, tokens=1000)
    assert auto.seconds("stream", {"stream": 1.0}, 1200) == pytest.approx(1.2 * 1.3)
    # What is known of one plan corrects the others.
    assert auto.seconds("kvpr", {"stream": 1.2, "kvpr": 2.0}, 1200) == pytest.approx(1.3 * 2.0)
    assert auto.seconds("stream", {"stream": 1.0}, 5000) == 1.0
