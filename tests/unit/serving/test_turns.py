"""Turns by what was served lately: with one sequence at a time too, whatever users a key names, in bounded memory."""

import random
from dataclasses import dataclass

import pytest

from megakv.serving.settings import ServingSettings
from megakv.serving.turns import MOST_GONE, WINDOW_TOKENS, Reader, Shares, turns
from tests.unit.serving.simulated import VOCABULARY, Simulation


def tokens(count: int) -> tuple[int, ...]:
    return tuple(random.choices(range(VOCABULARY), k=count))


@dataclass(frozen=True)
class Asker:
    """A user of a key."""

    key: str
    user: str


def begun(simulation: Simulation, steps: int = 1_000_000) -> list[str]:
    """Requests in the order in which they come to run."""
    order: dict[str, None] = {}
    for _ in range(steps):
        if not simulation.step():
            break
        order |= dict.fromkeys(each.request.id for each in simulation.leader.running)
    return list(order)


@pytest.mark.parametrize("sequences", [1, 2])
@pytest.mark.parametrize(("key", "other"), [("0", "1"), ("1", "0")])
def test_a_key_that_names_ever_new_users_has_one_share(sequences: int, key: str, other: str) -> None:
    simulation = Simulation(ServingSettings(max_sequences=sequences))
    for number in range(16):
        simulation.submit(f"greedy{number}", tokens(3), 40, key=key, user=f"fake{number}")
    begun(simulation, 5)
    for number in range(4):
        simulation.submit(f"other{number}", tokens(3), 40, key=other, user="host")
    order = begun(simulation)[sequences:]
    assert sum(name.startswith("other") for name in order[: 8 + sequences]) == 4, order


def test_users_take_turns_where_there_is_room_for_one_long_prompt() -> None:
    simulation = Simulation(ServingSettings(kv_tokens=1100))
    for number in range(6):
        simulation.submit(f"a{number}", tokens(1000), 2, user="a")
    simulation.step()
    for number in range(3):
        simulation.submit(f"b{number}", tokens(1000), 2, user="b")
    assert [name[0] for name in begun(simulation)] == [*"ababab", *"aaa"]


def test_turns_are_by_tokens_and_not_by_requests() -> None:
    """Who asks for ten times as much waits for ten of another's."""
    simulation = Simulation(ServingSettings(max_sequences=1))
    for number in range(4):
        simulation.submit(f"large{number}", tokens(300), 100, user="large")
    for number in range(40):
        simulation.submit(f"small{number}", tokens(30), 10, user="small")
    order = begun(simulation)
    places = [order.index(f"large{number}") for number in range(4)]
    assert all(8 <= later - earlier <= 13 for earlier, later in zip(places, places[1:], strict=False)), places


def test_whoever_asks_one_at_a_time_has_as_much_as_whoever_asks_many() -> None:
    simulation = Simulation(ServingSettings(max_sequences=1))
    for number in range(60):
        simulation.submit(f"many{number}", tokens(20), 20, user="many")
    asked = 0
    for _ in range(600):
        if asked == 0 or simulation.streams[f"one{asked - 1}"].finished is not None:
            simulation.submit(f"one{asked}", tokens(20), 20, user="one")
            asked += 1
        simulation.step()
    done = sum(stream.finished is not None for name, stream in simulation.streams.items() if name.startswith("many"))
    assert abs(done - asked) <= 2


def test_newcomers_do_not_starve_those_who_are_there() -> None:
    """A new name with each request, without end: each is one of many, no more."""
    simulation = Simulation(ServingSettings(max_sequences=1))
    for number in range(5):
        simulation.submit(f"old{number}", tokens(20), 20, user="old")
    for number in range(400):
        simulation.submit(f"new{number}", tokens(20), 20, user=f"new{number}")
        if simulation.streams["old4"].finished is not None:
            break
        for _ in range(21):
            simulation.step()
    assert simulation.streams["old4"].finished is not None
    assert number <= 100


def test_what_was_served_long_ago_is_forgotten() -> None:
    """Nobody who had much waits for longer than a window, and nobody saves anything up."""
    shares, greedy, modest, late = Shares(), Asker("", "greedy"), Asker("", "modest"), Asker("", "late")
    shares.enter(greedy)
    shares.enter(modest)
    for _ in range(100):
        shares.serve(greedy, WINDOW_TOKENS / 10)
    assert shares.of(greedy)[1] <= 2 * WINDOW_TOKENS
    shares.enter(late)
    assert shares.of(late)[1] == shares.of(modest)[1] == 0
    waited = 0
    while shares.of(late)[1] <= shares.of(greedy)[1]:
        shares.serve(late, 100)
        waited += 100
    assert waited <= 1.5 * WINDOW_TOKENS
    # One who was there, and comes back, begins at the least of those present, or where it left.
    shares.serve(modest, 500)
    shares.leave(late)
    before = shares.of(greedy)[1]
    shares.enter(late)
    assert shares.of(late)[1] >= shares.of(modest)[1] and shares.of(greedy)[1] == before


def test_memory_is_bounded_however_many_names_there_are() -> None:
    shares = Shares()
    stays = Asker("stays", "user")
    shares.enter(stays)
    for number in range(30_000):
        asker = Asker(f"key {number % 5}", f"user {number}")
        shares.enter(asker)
        shares.serve(asker, 1)
        shares.leave(asker)
    levels = [shares._keys, *(member.users for member in (*shares._keys.present.values(), *shares._keys.gone.values()))]
    assert len(levels) == 7
    assert all(level is not None and len(level.gone) <= MOST_GONE for level in levels)
    # What the flood was served is remembered of its keys.
    shares.enter(Asker("key 0", "user 0"))
    assert shares.of(Asker("key 0", "user 0"))[0] == 6000
    assert list(shares._keys.present) == ["stays", "key 0"]


def test_a_name_of_one_key_is_no_other_key_s() -> None:
    shares, one, other = Shares(), Asker("0", "user a"), Asker("1", "user a")
    for asker in (one, other):
        shares.enter(asker)
    shares.serve(one, 10)
    assert shares.of(one) == (10, 10) and shares.of(other) == (0, 0)


def test_prompts_are_read_by_turns_of_keys_and_then_of_users() -> None:
    # One key's three users, and another's one.
    readers = [Reader(0, user, at, 0, 100, key="0") for at, user in enumerate("abc")]
    readers.append(Reader(0, "d", 3, 0, 110, key="1"))
    assert turns(readers) == [0, 3, 1, 2]
    # Who was served far more lately comes later, though less is left; a little more does not matter.
    much = [Reader(0, "a", 0, 0, 50, served=(0, 1e5)), Reader(0, "b", 1, 0, 900)]
    little = [Reader(0, "a", 0, 0, 50, served=(0, 100)), Reader(0, "b", 1, 0, 900)]
    assert turns(much) == [1, 0] and turns(little) == [0, 1]
