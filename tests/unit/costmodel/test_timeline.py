"""Events of one rank and one link against a clock that walks through them."""

import math
import random

import numpy as np
import pytest

from megakv.costmodel.timeline import ChainRank, LayerWork, added


def random_work(layers: int, chunks: int) -> LayerWork:
    def seconds(*shape: int) -> np.ndarray:
        return np.random.default_rng(random.getrandbits(32)).exponential(1.0, shape)

    return LayerWork(seconds(layers), seconds(layers), seconds(layers, chunks), seconds(layers))


def chain_rank(work: LayerWork, handed: np.ndarray, seconds: np.ndarray, *, held: int) -> ChainRank:
    return ChainRank(work, handed, seconds, held=held).run()


def handing(layers: int, chunks: int) -> np.ndarray:
    generator = np.random.default_rng(random.getrandbits(32))
    return np.cumsum(generator.exponential(0.8, layers * chunks)).reshape(layers, chunks)


@pytest.mark.parametrize("chunks", [0, 1, 7])
@pytest.mark.parametrize("layers", [1, 2, 9])
def test_rank_walks_through_its_layers(layers: int, chunks: int) -> None:
    work, arrivals = random_work(layers, chunks), handing(layers, chunks)
    events = chain_rank(work, arrivals, np.zeros(chunks), held=layers * chunks + 1)
    clock = 0.0
    for layer in range(layers):
        assert events.starts[layer] == pytest.approx(clock)
        idle = 0.0
        clock += work.before[layer] + work.local[layer]
        for chunk in range(chunks):
            idle += max(0.0, arrivals[layer, chunk] - clock)
            clock = max(clock, arrivals[layer, chunk])
            assert events.pickups[layer][chunk] == pytest.approx(clock)
            clock += work.chunks[layer, chunk]
        clock += work.after[layer]
        assert events.ends[layer] == pytest.approx(clock)
        assert events.waited[layer] == pytest.approx(idle, abs=1e-9)


def test_room_for_two_chunks_is_enough_where_attention_takes_longer() -> None:
    for _ in range(10):
        work, handed = random_work(6, 4), handing(6, 4)
        seconds = np.full(4, work.chunks.min())
        two, all_of_them = (chain_rank(work, handed, seconds, held=held) for held in (2, 25))
        for name in ("starts", "ends", "pickups", "waited"):
            assert np.allclose(getattr(two, name), getattr(all_of_them, name))


def test_a_full_house_keeps_the_link_waiting() -> None:
    """Four chunks of 2 s each are handed over at once; after 10 s each is attended to for 1 s."""
    one = np.ones(1)
    work = LayerWork(10 * one, 0 * one, np.ones((1, 4)), 0 * one)
    handed, seconds = np.zeros((1, 4)), np.full(4, 2.0)
    limited = chain_rank(work, handed, seconds, held=2)
    # Two wait at 10; the third sets out at 11, when the first is done, the fourth at 13 behind it on the link.
    assert limited.pickups == [[10, 11, 13, 15]]
    assert limited.ends == [16] and limited.waited.tolist() == [2]
    assert chain_rank(work, handed, seconds, held=4).ends == [14]


def test_link_sends_one_message_after_another() -> None:
    generator = np.random.default_rng(random.getrandbits(32))
    handed, seconds = np.sort(generator.uniform(0, 30, (8, 5)).ravel()).reshape(8, 5), generator.exponential(1.0, 5)
    nothing = LayerWork(np.zeros(8), np.zeros(8), np.zeros((8, 5)), np.zeros(8))
    arrived = chain_rank(nothing, handed, seconds, held=8 * 5 + 1).pickups
    clock = 0.0
    for layer in range(8):
        for message in range(5):
            clock = max(clock, handed[layer, message]) + seconds[message]
            assert arrived[layer][message] == pytest.approx(clock)


def test_two_that_share_a_processor() -> None:
    """With both exposed by a part, the shorter hides all but that part; the longer takes what `overlapped` says."""
    assert added(0.25, 1.0, 10.0, 0.5) == pytest.approx(0.025)
    # Work that is outlasted runs slower throughout: at rates u and v with 0.25 = (1 - u) / v and 0.5 = (1 - v) / u.
    slow = (1 - 0.25) / (1 - 0.5 * 0.25)
    assert added(0.25, 100.0, 1.0, 0.5) == pytest.approx(1 / slow - 1)
    # Nothing is hidden: both take turns.
    assert added(1.0, 100.0, 1.0, 1.0) == 1
    assert added(1.0, 1.0, 4.0, 1.0) == 0.25
    assert added(0.0, 5.0, 1.0, 0.7) == 0
    # Where nothing of the one is hidden, nothing of the other is either, whatever was measured of it.
    assert added(1.0, 3.0, 1.0, 0.5) == added(0.5, 3.0, 1.0, 1.0) == 1
    for nothing in ((0.5, 0.0, 1.0, 0.5), (0.5, 1.0, 0.0, 0.5)):
        assert added(*nothing) == 0
    for _ in range(100):
        exposed, other = random.random(), random.random()
        assert 0 <= added(exposed, random.expovariate(1), random.expovariate(1), other) < math.inf
