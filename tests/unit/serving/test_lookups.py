"""How many candidates a pass has, against all numbers that it might have; what is learned of streams."""

import itertools
import random
from dataclasses import dataclass

import pytest

from megakv.serving.lookups import LEAST_GAIN, PRIORS, PROBE, Proposals, StreamLookup
from megakv.serving.pass_times import PassSize, PassTimes


@dataclass
class Told:
    """A stream of so many tokens."""

    tokens: list[int]
    lookup: StreamLookup | None
    proposable: int = 100
    stop_ids: frozenset[int] = frozenset()


def times(alone: float = 0.01, sequence: float = 0.001, some: float = 0.0, each: float = 0.0005) -> PassTimes:
    """As measured on a machine that takes so long for any pass, a sequence, candidates at all, and each of them."""
    found = PassTimes()
    for sequences, candidates in itertools.product((1, 2, 4, 9), (0, 1, 8, 40)):
        seconds = alone + sequence * sequences + some * (candidates > 0) + each * candidates
        found.add(PassSize(sequences=sequences, candidates=candidates), seconds)
    return found


def copying(known: int = 60, most: int = 16) -> Told:
    """A stream that copies what it was given."""
    given = random.sample(range(1000), known)
    stream = Told([*given, *given[: known // 2]], StreamLookup(most))
    for end in range(known, len(stream.tokens)):
        assert stream.lookup is not None
        stream.lookup.add(stream.tokens[stream.lookup.tokens.length : end])
    return stream


def new() -> Told:
    """A stream in which nothing is found twice."""
    return Told(random.sample(range(1000), 50), StreamLookup(16))


def test_chances_follow_what_came_true() -> None:
    lookup = StreamLookup(8)
    lookup.add([1, 2, 3, 1])
    assert lookup.chances(2) == pytest.approx([PRIORS[0], PRIORS[0] * PRIORS[1]])
    stream = copying()
    assert stream.lookup is not None
    chances = stream.lookup.chances(16)
    assert chances == sorted(chances, reverse=True) and chances[3] > 0.8
    # What is found again and does not come true is soon expected not to.
    stubborn = StreamLookup(8)
    for number in range(40):
        stubborn.add([7])
        stubborn.add([100 + number])
    stubborn.add([7])
    assert stubborn.tokens.guess(1) == [100] and stubborn.chances(1)[0] < PRIORS[0] / 2


def test_a_pass_has_the_candidates_that_give_most_tokens_in_a_second() -> None:
    for _ in range(50):
        streams: list[Told] = [random.choice([copying, new])() for _ in range(random.randint(1, 9))]
        measured = times(random.uniform(0.001, 0.02), random.uniform(0, 0.002), each=random.choice([1e-4, 2e-3, 1e-2]))
        size = PassSize(sequences=len(streams))
        found = Proposals(measured).of(streams, size)

        def rate(widths: list[int], streams: list[Told] = streams, measured: PassTimes = measured) -> float:
            chances = [stream.lookup.chances(own) for stream, own in zip(streams, widths, strict=True) if stream.lookup]
            size = PassSize(sequences=len(streams), candidates=sum(widths))
            return (len(streams) + sum(map(sum, chances))) / measured.seconds(size)

        widths = [len(own) for own in found]
        # One more or one less of any stream gives no more.
        least = max(rate(widths), LEAST_GAIN * rate([0] * len(widths)))
        for at, stream in enumerate(streams):
            assert stream.lookup is not None
            for more in {min(widths[at] + 1, len(stream.lookup.tokens.guess(16))), max(widths[at] - 1, 0)}:
                other = [*widths[:at], more, *widths[at + 1 :]]
                assert sum(other) > measured.trusted_candidates or rate(other) <= least * (1 + 1e-6)
        for stream, own in zip(streams, found, strict=True):
            assert stream.lookup is not None and own == stream.lookup.tokens.guess(len(own))


def test_where_nothing_is_gained_nothing_is_looked_up_but_tried_again_now_and_then() -> None:
    """What candidates cost may have been measured on a busy machine."""
    stream = copying()
    assert stream.lookup is not None
    proposals, known = Proposals(times(each=0.1)), stream.lookup.tokens.length
    for _ in range(PROBE):
        assert proposals.of([stream], PassSize(sequences=1)) == [[]]
    assert stream.lookup.tokens.length == known < len(stream.tokens)
    (found,) = proposals.of([stream], PassSize(sequences=1))
    assert found and stream.lookup.tokens.length == len(stream.tokens)
    assert proposals.of([stream], PassSize(sequences=1)) == [[]]


def test_no_more_than_there_is_use_for() -> None:
    measured = PassTimes(few=20)
    assert Proposals(measured).of([Told([1, 2] * 9, None)], PassSize(sequences=1)) == [[]]
    # Before any was measured, a few.
    for sequences in (1, 2):
        measured.add(PassSize(sequences=sequences), 0.01)
    assert len(Proposals(measured).of([copying()], PassSize(sequences=1))[0]) == measured.trusted_candidates == 4
    proposals = Proposals(measured)
    assert proposals.of([copying()], PassSize(sequences=1))[0]
    measured.add(PassSize(sequences=1, candidates=4), 0.5)
    # The next pass knows what that one took.
    assert proposals.of([copying()], PassSize(sequences=1)) == [[]]
    measured.add(PassSize(sequences=1, candidates=20), 0.01)
    stream = copying()
    assert len(Proposals(measured).of([stream], PassSize(sequences=1))[0]) == 16
    stream.proposable = 2
    assert len(Proposals(measured).of([stream], PassSize(sequences=1))[0]) == 2
    stream.proposable, stream.stop_ids = 9, frozenset([stream.tokens[30 + 4]])
    assert len(Proposals(measured).of([stream], PassSize(sequences=1))[0]) == 4
    # Beyond `few` rows layers take another way.
    many = [copying() for _ in range(10)]
    assert sum(map(len, Proposals(measured).of(many, PassSize(sequences=10)))) <= 10
