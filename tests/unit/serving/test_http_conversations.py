"""Responses are kept within a bound, and those that others go on from are counted as long as they are held."""

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


def test_letters_are_bounded_and_shared_ones_count_once() -> None:
    kept = Conversations(most=1000, most_letters=100_000)
    document = turn(None, 50_000)
    kept.keep("document", document)
    for number in range(15):
        kept.keep(f"fork {number}", turn(document, 10))
    assert kept.find("document", "one") is document and kept.find("fork 0", "one") is not None
    for number in range(50):
        kept.keep(f"other {number}", turn(None, random.randrange(20_000)))
        assert kept._letters() <= 100_000 or len(kept._turns) == 1
    # Dropped, it is still held by those that go on from it.
    chain = turn(None, 90_000)
    kept.keep("long", chain)
    kept.keep("after", turn(chain, 9_000))
    assert kept.find("after", "one") is not None and len(kept._turns) == 1
    assert [message["role"] for message in turn(chain, 1).messages] == ["user", "user"]


def test_what_a_response_repeats_of_its_body_counts() -> None:
    kept = Conversations(most=1000, most_letters=100_000)
    for number in range(20):
        response = {"tools": [{"name": "a" * 30_000}]}
        kept.keep(f"call {number}", Turn("one", None, ({"role": "user", "content": "a"},), response))
    assert len(kept._turns) <= 3
