"""Responses are kept within bounds that keys share, and those that others go on from count as long as they are held."""

import random

from megakv.serving.http.conversations import Conversations, Turn


def turn(previous: Turn | None, letters: int, owner: str = "one") -> Turn:
    return Turn(owner, previous, ({"role": "user", "content": "a" * letters},), {})


def test_the_last_used_are_kept() -> None:
    kept = Conversations(most=3)
    for name in "abc":
        kept.keep(name, turn(None, 1))
    assert kept.find("a", "one") is not None and kept.find("a", "another") is None
    kept.keep("d", turn(None, 1))
    assert [kept.find(name, "one") is not None for name in "abcd"] == [True, False, True, True]
    assert kept.drop("a", "one") and not kept.drop("a", "one") and not kept.drop("c", "another")


def test_bytes_are_bounded_and_shared_ones_count_once() -> None:
    kept = Conversations(most=1000, most_bytes=100_000)
    document = turn(None, 50_000)
    kept.keep("document", document)
    for number in range(15):
        kept.keep(f"fork {number}", turn(document, 10))
    assert kept.find("document", "one") is document and kept.find("fork 0", "one") is not None
    for number in range(50):
        kept.keep(f"other {number}", turn(None, random.randrange(20_000)))
        assert kept.bytes <= 100_000 or kept.count == 1
    # Dropped, it is still held by those that go on from it.
    chain = turn(None, 90_000)
    kept.keep("long", chain)
    kept.keep("after", turn(chain, 9_000))
    assert kept.find("after", "one") is not None and kept.count == 1
    assert [message["role"] for message in turn(chain, 1).messages] == ["user", "user"]


def test_what_a_response_repeats_of_its_body_counts() -> None:
    kept = Conversations(most=1000, most_bytes=100_000)
    for number in range(20):
        response = {"tools": [{"name": "a" * 30_000}]}
        kept.keep(f"call {number}", Turn("one", None, ({"role": "user", "content": "a"},), response))
    assert kept.count <= 3


def test_of_turns_that_are_only_gone_on_from_responses_are_not_held() -> None:
    """However long a line gets, each of whose responses repeats long instructions."""
    kept = Conversations(most=1000, most_bytes=100_000)
    last = turn(None, 1)
    for number in range(30):
        response = {"instructions": "a" * 30_000}
        last = Turn("one", last, ({"role": "user", "content": str(number)},), response)
        kept.keep(str(number), last)
        assert kept.bytes <= 100_000 or kept.count == 1
    assert [message["content"] for message in last.messages] == ["a", *map(str, range(30))]
    assert kept.find("29", "one") is last and last.response and kept.find("0", "one") is None
    assert sum(len(str(turn.response)) for turn in last.line) < 100_000
    assert kept.drop("29", "one") and not last.response


def test_one_owner_does_not_push_out_another_s() -> None:
    """Neither by how many they are nor by their size: each keeps an equal part."""
    for kept, letters in ((Conversations(most=20), 1), (Conversations(most=10_000, most_bytes=100_000), 5_000)):
        for number in range(4):
            kept.keep(f"mine {number}", turn(None, letters, "other"))
        for number in range(200):
            kept.keep(f"theirs {number}", turn(None, letters, "greedy"))
        assert all(kept.find(f"mine {number}", "other") is not None for number in range(4))
        assert kept.find("theirs 199", "greedy") is not None and kept.find("theirs 0", "greedy") is None
        for number in range(200):
            kept.keep(f"later {number}", turn(None, letters, "third"))
        owners = [sum(kept.find(f"{kind} {n}", owner) is not None for n in range(200)) for kind, owner in
                  (("mine", "other"), ("theirs", "greedy"), ("later", "third"))]  # fmt: skip
        # The second and the third share what the first leaves.
        assert owners[0] == 4 and abs(owners[1] - owners[2]) <= 1
        assert kept.count <= 20 and kept.bytes <= 100_000
    assert kept.drop("mine 0", "other") and kept.find("mine 0", "other") is None


def test_what_is_held_is_what_can_be_reached() -> None:
    kept, turns = Conversations(most=12, most_bytes=100_000), list[Turn]()
    for number in range(400):
        owner = random.choice("abc")
        mine = [each for each in turns[-20:] if each.owner == owner]
        previous = random.choice([None, *mine])
        response = {"a": "b" * random.randrange(3000)}
        turns.append(Turn(owner, previous, ({"role": "user", "content": "a" * random.randrange(9000)},), response))
        kept.keep(str(number), turns[-1])
        if random.random() < 0.3:
            kept.drop(str(random.randrange(number + 1)), owner)
        reached = {id(each): each for named in kept._turns.values() for last in named.values() for each in last.line}
        assert kept.bytes == sum(each.bytes for each in reached.values())
        assert kept._holders.keys() == reached.keys() and kept._bytes.keys() == kept._turns.keys()


def test_letters_of_any_alphabet_count_as_the_memory_they_take() -> None:
    for letter, each in (("a", 1), ("\u4e00", 2), ("\U0001f600", 4)):
        content = ({"role": "user", "content": letter * 1000},)
        assert 0 <= Turn("one", None, content, {}).bytes - 1000 * each - 2000 < 400
