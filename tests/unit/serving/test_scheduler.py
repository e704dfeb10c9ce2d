"""The scheduler by a fake clock: gaps, shares, fairness; and the times of passes against what they came from."""

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest

from megakv.serving.pass_times import PassSize, PassTimes
from megakv.serving.scheduler import ALONE_GAPS, LEAST_CHUNK, Choice, Scheduler
from megakv.serving.settings import ServingSettings
from megakv.serving.turns import Reader, allot, turns
from tests.unit.serving.simulated import VOCABULARY, Machine, Simulation


def tokens(count: int) -> tuple[int, ...]:
    return tuple(random.choices(range(VOCABULARY), k=count))


def reading_alone(machine: Machine, length: int, gap: float) -> float:
    """Seconds that a prompt takes that nobody else is served beside."""
    simulation = Simulation(ServingSettings(max_gap_s=gap), machine=machine)
    warm_up(simulation)
    stream = simulation.submit("alone", tokens(length), 1)
    simulation.run()
    return stream.times[0] - stream.submitted


def warm_up(simulation: Simulation) -> None:
    """Let it measure passes, as it does at any time but the first seconds."""
    simulation.submit("warm", tokens(14_000), 20)
    simulation.run()


@pytest.mark.parametrize("most_mixed", [math.inf, 0, 64])
def test_streams_do_not_stall_while_a_long_prompt_is_read(most_mixed: float) -> None:
    machine = Machine()
    gap = machine.seconds([0], [7000], [False]) / 50
    alone = reading_alone(machine, 7000, gap)
    simulation = Simulation(ServingSettings(max_gap_s=gap), machine=machine, most_mixed=most_mixed)
    warm_up(simulation)
    streams = [simulation.submit(f"s{number}", tokens(5), 500) for number in range(4)]
    for _ in range(10):
        simulation.step()
    long = simulation.submit("long", tokens(7000), 1)
    while not long.progress or long.progress[-1].read < 3000:
        simulation.step()
    short = simulation.submit("short", tokens(50), 1)
    simulation.run()
    assert long.finished is not None and streams[0].finished is not None
    assert max(max(stream.gaps) for stream in streams) <= gap
    # It comes when a pass is under way, at worst.
    assert short.times[0] - short.submitted <= 2 * gap
    assert long.times[0] - long.submitted <= 1.1 * alone


@pytest.mark.drawn(4)
@pytest.mark.parametrize("most_mixed", [math.inf, 0, 64])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.8])
def test_decoding_keeps_its_share(share: float, most_mixed: float) -> None:
    machine = Machine()
    gap = machine.seconds([0], [7000], [False]) / 60
    simulation = Simulation(ServingSettings(max_gap_s=gap, decode_share=share), machine=machine, most_mixed=most_mixed)
    warm_up(simulation)
    streams = [simulation.submit(f"s{number}", tokens(5), 4000) for number in range(4)]
    for _ in range(60):
        simulation.step()
    rate = 30 / (streams[0].times[-1] - streams[0].times[-31])
    long = simulation.submit("long", tokens(7000), 1)
    began, before = simulation.now, len(streams[0].tokens)
    while not long.times:
        simulation.step()
    took = simulation.now - began
    # Seven tokens of a hundred for what the share is made of: whole passes.
    assert (len(streams[0].tokens) - before) / took >= 0.93 * share * rate
    assert took <= 1.05 * reading_alone(machine, 7000, gap) / (1 - share)


@pytest.mark.parametrize("most_mixed", [0, 64])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_prompts_and_streams_share_no_pass_where_that_takes_longer(share: float, most_mixed: int) -> None:
    """Whoever comes with a short prompt, at any time, beside streams or a long prompt too."""
    settings = ServingSettings(max_gap_s=0.3, decode_share=share)
    simulation = Simulation(settings, most_mixed=most_mixed)
    warm_up(simulation)
    mixed, passes, seconds = list[int](), 0, simulation.machine.seconds

    def noted(pasts: Sequence[int], new: Sequence[int], decodes: Sequence[bool]) -> float:
        nonlocal passes
        passes += 1
        if len(set(decodes)) > 1:
            mixed.append(sum(new))
        return seconds(pasts, new, decodes)

    simulation.machine.seconds = noted  # type: ignore[method-assign]
    streams = [simulation.submit(f"s{number}", tokens(5), 300) for number in range(3)]
    for number in range(16):
        for _ in range(10):
            simulation.step()
        streams.append(simulation.submit(f"later{number}", tokens(3000 if number == 4 else 40), 100))
    simulation.run()
    assert passes > 250 and max(mixed, default=0) <= most_mixed
    assert len(mixed) >= 10 * bool(most_mixed)
    assert all(stream.finished is not None for stream in streams)
    assert max(max(stream.gaps) for stream in streams) <= 0.3


def test_a_long_prompt_is_read_beside_streams_in_the_way_that_takes_less() -> None:
    """In the streams' passes, unless so little of it fits into them that passes between theirs read it sooner."""
    machine, took, shared = Machine(), list[float](), list[int]()
    seconds = machine.seconds

    def noted(pasts: Sequence[int], new: Sequence[int], decodes: Sequence[bool]) -> float:
        shared[-1] += len(set(decodes)) > 1
        return seconds(pasts, new, decodes)

    machine.seconds = noted  # type: ignore[method-assign]
    for most_mixed in (200, 30, 0):
        shared.append(0)
        simulation = Simulation(ServingSettings(max_gap_s=0.3), machine=machine, most_mixed=most_mixed)
        warm_up(simulation)
        streams = [simulation.submit(f"s{number}", tokens(5), 1000) for number in range(4)]
        for _ in range(10):
            simulation.step()
        shared[-1] = 0
        long = simulation.submit("long", tokens(7000), 1)
        simulation.run()
        assert max(max(stream.gaps) for stream in streams) <= 0.3
        took.append(long.times[0] - long.submitted)
    # What is left at the end may fit into one pass.
    assert shared[0] > 30 and shared[1] <= 1 and shared[2] == 0
    assert took[0] < took[1] <= 1.01 * took[2]


@pytest.mark.parametrize("slow", [False, True])
def test_whoever_comes_while_a_long_prompt_is_read_alone_does_not_wait_for_it(slow: bool) -> None:
    """It is read within a gap, or in a few where short chunks take much longer for each token."""
    machine = Machine(each=0.2) if slow else Machine()
    simulation = Simulation(ServingSettings(max_gap_s=0.3), machine=machine)
    warm_up(simulation)
    long = simulation.submit("long", tokens(7000), 1)
    waits, began = list[float](), simulation.now
    while not long.times:
        simulation.step()
        if len(simulation.streams) < 6 and random.random() < 0.3:
            simulation.submit(f"short{len(simulation.streams)}", tokens(20), 1)
    simulation.run()
    alone = machine.seconds([0], [7000], [False])
    shorts = [stream for name, stream in simulation.streams.items() if name.startswith("short")]
    waits = [stream.times[0] - stream.submitted for stream in shorts]
    assert waits and max(waits) <= (ALONE_GAPS if slow else 1) * 0.3 + 0.3
    assert long.times[0] - began <= 1.25 * alone + sum(map(len, (stream.prompt for stream in shorts))) * machine.token


def test_nothing_is_owed_to_streams_that_were_not_there() -> None:
    """A long prompt is read alone; then somebody streams, and prompts go on being read."""
    settings, machine = ServingSettings(max_gap_s=0.5, decode_share=0.5), Machine(each=0.3, token=1e-5)
    simulation = Simulation(settings, machine=machine, most_mixed=0)
    simulation.submit("long", tokens(90_000), 1)
    for _ in range(20):
        simulation.step()
    stream, other = simulation.submit("stream", tokens(5), 1000), simulation.submit("other", tokens(400), 1)
    while not stream.tokens:
        simulation.step()
    computed = simulation.leader.counts.computed_tokens
    for _ in range(12):
        simulation.step()
    assert simulation.leader.counts.computed_tokens > computed + 400 and other.tokens


def test_a_stream_of_short_prompts_does_not_starve_a_long_one() -> None:
    simulation = Simulation(ServingSettings(max_gap_s=0.3))
    long = simulation.submit("long", tokens(2000), 1)
    for number in range(2000):
        simulation.submit(f"short{number}", tokens(150), 1)
        simulation.step()
        if long.finished is not None:
            break
    assert long.finished is not None


def test_turns() -> None:
    readers = [
        Reader(0, "a", 0, 0, 900),
        Reader(0, "a", 1, 0, 50),
        Reader(0, "b", 2, 0, 700),
        Reader(1, "a", 3, 0, 5000),
        Reader(0, "a", 4, 0, 40),
    ]
    # Priority, then the shortest of each user, then the next ones.
    assert turns(readers) == [3, 4, 2, 1, 0]


def test_allotted_tokens_add_up_and_the_oldest_has_its_part() -> None:
    for _ in range(200):
        readers = [
            Reader(random.randint(0, 1), random.choice("ab"), arrival, 0, random.randint(1, 100))
            for arrival in range(random.randint(1, 6))
        ]
        total = random.randint(1, sum(reader.left for reader in readers))
        chunks = allot(readers, turns(readers), total)
        assert sum(chunks) == total
        assert all(0 <= chunk <= reader.left for chunk, reader in zip(chunks, readers, strict=True))
        top = max(reader.priority for reader in readers)
        oldest = next(at for at, reader in enumerate(readers) if reader.priority == top)
        assert chunks[oldest] >= min(readers[oldest].left, total // 4)


def test_chunks_of_a_slow_machine_are_small_and_never_none() -> None:
    times = PassTimes()
    scheduler = Scheduler(ServingSettings(max_gap_s=0.01), times)
    for _ in range(5):
        scheduler.measured(PassSize(100, 5000), 5.0, reading=True)
    assert scheduler.next([Reader(0, "", 0, 0, 1000)], PassSize()) == Choice([LEAST_CHUNK])


def test_times_that_are_a_sum_are_found() -> None:
    random.seed(random.random())
    machine = Machine(*np.random.default_rng().uniform(0.5, 2, 5) * [0.02, 0.002, 2e-7, 0.002, 1e-7])
    times = PassTimes()

    def drawn() -> tuple[PassSize, float]:
        streams = [random.randint(1, 5000) for _ in range(random.randint(0, 20))]
        size = PassSize(sequences=len(streams), context=sum(streams))
        past, new = random.randint(0, 5000), random.choice([0, random.randint(2, 500)])
        if new:
            size = size.with_prompt(past, new)
        pasts, counts = [*streams, past][: len(streams) + (new > 0)], [*[1] * len(streams), new]
        decodes = [*[True] * len(streams), False][: len(pasts)]
        return size, machine.seconds(pasts, counts[: len(pasts)], decodes)

    for _ in range(200):
        size, seconds = drawn()
        times.add(size, seconds * random.uniform(0.99, 1.01))
    for _ in range(50):
        size, seconds = drawn()
        assert times.seconds(size) == pytest.approx(seconds, rel=0.05)
    assert times.margin < 1.1


def test_few_and_many_tokens_have_times_of_their_own() -> None:
    times = PassTimes(few=100)
    assert times.seconds(PassSize(10, 50.0)) == times.seconds(PassSize(1000, 50.0)) == 0
    for _ in range(9):
        times.add(PassSize(50, 100.0, 2), 0.5)
    # What nobody has measured is like what somebody has.
    assert times.seconds(PassSize(200, 400.0, 8)) >= times.seconds(PassSize(50, 100.0, 2)) == pytest.approx(0.5)
    for _ in range(9):
        times.add(PassSize(200, 400.0, 8), 9.0)
        times.add(PassSize(sequences=300), 0.7)
    assert times.seconds(PassSize(50, 100.0, 2)) == pytest.approx(0.5)
    assert times.seconds(PassSize(200, 400.0, 8)) == pytest.approx(9.0)
    assert times.seconds(PassSize(sequences=300)) == pytest.approx(0.7)


def test_a_prompt_comes_before_any_was_measured() -> None:
    """As where the first passes of a server that has a slow model are single tokens."""
    times = PassTimes()
    for sequences in range(1, 5):
        times.add(PassSize(sequences=sequences, context=10 * sequences), 0.5 * sequences)
    choice = Scheduler(ServingSettings(), times).next([Reader(0, "", 0, 0, 500)], PassSize(sequences=2, context=20))
    assert sum(choice.chunks) > 0


def test_nothing_is_known_at_first() -> None:
    times = PassTimes()
    assert times.seconds(PassSize(10, 50.0)) == 0
    assert times.margin == 1


@pytest.mark.parametrize(
    "changes",
    [{"max_gap_s": 0}, {"decode_share": 1}, {"chunk_tokens": 0}, {"kv_tokens": 0}, {"store_gb": float("nan")}],
)
def test_settings_that_cannot_be_are_named(changes: dict[str, float]) -> None:
    name, value = next(iter(changes.items()))
    with pytest.raises(ValueError, match=f"{name} = {value}"):
        ServingSettings(**changes)  # type: ignore[arg-type]
