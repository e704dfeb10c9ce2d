"""Small messages through memory that several ranks see, and over connections."""

import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import combinations, count
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megakv.distributed import channel
from megakv.distributed.channel import SLOT_BYTES, Channel, load_channel, make_channel
from megakv.distributed.direct import is_over

RANKS = 3


@pytest.fixture(autouse=True)
def compiled() -> None:
    if load_channel()[0] is None:
        pytest.skip(f"no compiled calls: {load_channel()[1]}")


def on_threads(count: int, run: Callable[[int], Any]) -> list[Any]:
    """What ranks that are threads return, or raise."""
    found: list[Any] = [None] * count

    def rank(own: int) -> None:
        try:
            found[own] = run(own)
        except Exception as error:
            found[own] = error

    threads = [threading.Thread(target=rank, args=(own,)) for own in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


class Meeting:
    def __init__(self, count: int):
        self._barrier, self._values = threading.Barrier(count), [None] * count

    def gather(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait(60)
        found = list(self._values)
        self._barrier.wait(60)
        return found


@pytest.fixture
def sockets() -> Iterator[Callable[[int], list[dict[int, socket.socket]]]]:
    """Connections of each of some ranks to each."""
    with ExitStack() as stack:

        def connected(count: int) -> list[dict[int, socket.socket]]:
            links: list[dict[int, socket.socket]] = [{} for _ in range(count)]
            for first, second in combinations(range(count), 2):
                pair = [stack.enter_context(each) for each in socket.socketpair()]
                for end in pair:
                    end.setblocking(False)
                links[first][second], links[second][first] = pair
            return links

        yield connected


def channels(
    groups: list[list[int]], links: Any = None, *, spins: Callable[[int], bool] = lambda _: True, timeout_s: float = 30
) -> list[Channel]:
    """Those of all ranks, which are in one group each."""
    meeting = Meeting(sum(map(len, groups)))

    def made(rank: int) -> Channel | None:
        group = next(group for group in groups if rank in group)
        gather = lambda value: meeting.gather(rank, value)  # noqa: E731
        own = {} if links is None else links[rank]
        return make_channel(group, group.index(rank), gather, own, spins=spins(rank), timeout_s=timeout_s)

    return on_threads(sum(map(len, groups)), made)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not [name for name in os.listdir(channel.FOLDER) if name.startswith(f"megakv-{os.getpid()}-")]


def in_memory(found: list[Channel]) -> set[bool]:
    return {each._channel.memory is not None for each in found}


@pytest.mark.parametrize("memory", [True, False])
def test_messages_of_all_sizes_and_types_come_in_their_order(sockets: Any, memory: bool) -> None:
    found = channels([list(range(RANKS))], sockets(RANKS), spins=lambda rank: memory or rank == 1)
    assert in_memory(found) == {memory}
    kinds = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
    drawn = [(int(torch.randint(0, 3000, ())), kinds[int(torch.randint(len(kinds), ()))]) for _ in range(300)]
    longer = [SLOT_BYTES, SLOT_BYTES + 1, 3 * SLOT_BYTES, 4 * SLOT_BYTES + int(torch.randint(1000, ())), 0, 1]
    sizes = [*drawn, *((size, torch.uint8) for size in longer)]
    sent = [[(torch.randn(size) * 9).to(kind) for size, kind in sizes] for _ in range(RANKS)]

    def exchange(own: int) -> list[torch.Tensor]:
        received = []
        for message in sent[own]:
            # Some are late.
            if torch.rand(()) < 0.02:
                time.sleep(0.003)
            received.append(message.new_empty((RANKS, *message.shape)))
            found[own].all_gather(message, received[-1])
        return received

    for received in on_threads(RANKS, exchange):
        assert not isinstance(received, Exception), received
        for index, whole in enumerate(received):
            assert torch.equal(whole, torch.stack([own[index] for own in sent]))


def test_groups_have_their_own() -> None:
    found = channels([[0, 2], [1, 3]])

    def exchange(own: int) -> list[int]:
        received = torch.zeros(2, 1, dtype=torch.int64)
        found[own].all_gather(torch.tensor([own]), received)
        return received.flatten().tolist()

    assert on_threads(4, exchange) == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_messages_of_different_sizes_are_an_error() -> None:
    found = channels([[0, 1]], timeout_s=5)

    def exchange(own: int) -> None:
        found[own].all_gather(torch.zeros(4 + own), torch.zeros(2, 4 + own))

    assert [str(error) for error in on_threads(2, exchange)] == ["ranks exchange messages of different sizes"] * 2


@pytest.mark.parametrize("memory", [True, False])
def test_who_does_not_come_is_waited_for_no_longer_than_said(sockets: Any, memory: bool) -> None:
    found, begun = channels([[0, 1]], sockets(2), spins=lambda _: memory, timeout_s=0.3)[0], time.monotonic()
    with pytest.raises(dist.DistNetworkError, match=r"Timed out after 0\.3 s"):
        found.all_gather(torch.zeros(4), torch.zeros(2, 4))
    assert 0.3 <= time.monotonic() - begun < 10


@pytest.mark.parametrize("memory", [True, False])
def test_who_is_gone_is_noticed(sockets: Any, memory: bool) -> None:
    """By the connection that ended with it."""
    links = sockets(2)
    found = channels([[0, 1]], links, spins=lambda _: memory, timeout_s=60)[0]
    threading.Timer(0.2, links[1][0].close).start()
    begun = time.monotonic()
    with pytest.raises(dist.DistNetworkError, match="Connection closed by rank 1"):
        found.all_gather(torch.zeros(4), torch.zeros(2, 4))
    assert time.monotonic() - begun < 10


def test_a_check_of_the_calls_waits_for_late_threads() -> None:
    """On a busy machine one may start long after the other, which by then looks whether it is still there."""
    calls = load_channel()[0]
    assert calls is not None
    exchange, turns = calls.exchange, count()

    def late(*message: Any) -> int:
        if next(turns) % 3 == 1:
            time.sleep(0.3)
        return int(exchange(*message))

    class Late:
        bytes, exchange = calls.bytes, staticmethod(late)

    begun = time.monotonic()
    assert channel._problem(Late()) == ""  # type: ignore[arg-type]
    assert time.monotonic() - begun > 1


def test_a_look_at_a_connection_never_waits() -> None:
    one, other = socket.socketpair()
    with one:
        assert not is_over(one)
        other.send(b"unread")
        assert not is_over(one)
        other.close()
        one.recv(6)
        assert is_over(one)
    assert is_over(one)


def test_an_interrupt_ends_a_wait() -> None:
    """It comes where Python runs: between two looks at whether others are there."""
    found = channels([[0, 1]])[0]
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        found.all_gather(torch.zeros(4), torch.zeros(2, 4))
    assert time.monotonic() - begun < 10


def test_one_that_nobody_holds_is_gone() -> None:
    found = channels([[0, 1]])
    gone = weakref.ref(found[0])
    found.clear()
    assert gone() is None


@pytest.mark.parametrize("reason", ["not wanted", "no folder", "no memory"])
def test_none_has_memory_where_one_cannot(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason == "no folder":
        monkeypatch.setattr(channel, "FOLDER", channel.FOLDER / "megakv-nowhere")
    if reason == "no memory":
        monkeypatch.setattr(channel, "SLOT_BYTES", 1 << 50)
    assert in_memory(channels([[0, 1, 2]], spins=lambda rank: rank != 1 or reason != "not wanted")) == {False}


def test_none_has_a_channel_where_one_cannot_load_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter([load_channel()] * 2 + [(None, "no compiler")])
    monkeypatch.setattr(channel, "load_channel", lambda: next(calls))
    assert channels([[0, 1, 2]]) == [None] * 3


def test_a_meeting_that_fails_leaves_no_memory() -> None:
    calls = load_channel()[0]
    assert calls is not None

    def gather(_: Any) -> list[Any]:
        raise dist.DistNetworkError("Connection closed")

    with pytest.raises(dist.DistNetworkError):
        channel._shared_memory(calls, [0, 1], 0, gather, wanted=True)
