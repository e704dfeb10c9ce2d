"""Small messages over connections of the ranks' own."""

import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from megakv.distributed.direct import Links, connect_directly, exchange

RANKS = 3


class Meeting:
    """What ranks that are threads gather; rank `unreachable` gives addresses that nobody answers at."""

    def __init__(self, unreachable: int | None = None):
        self.unreachable = unreachable
        self._barrier = threading.Barrier(RANKS)
        self._values: list[object] = [None] * RANKS

    def gather(self, rank: int, value: object) -> list[object]:
        if rank == self.unreachable and isinstance(value, tuple):
            value = ([], value[1], "another word")
        self._values[rank] = value
        self._barrier.wait(60)
        found = list(self._values)
        self._barrier.wait(60)
        return found


def connected(meeting: Meeting) -> list[Links]:
    links: list[Links] = [{}] * RANKS

    def rank(number: int) -> None:
        links[number] = connect_directly(
            number, lambda value: meeting.gather(number, value), world_size=RANKS, hosts=["127.0.0.1"]
        )

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return links


@pytest.fixture
def links() -> Iterator[list[Links]]:
    found = connected(Meeting())
    yield found
    for own in found:
        for link in own.values():
            link.close()


def all_to_all(links: list[Links], elements: int, *, spins: bool, dtype: torch.dtype) -> None:
    """Every rank sends another tensor to every other one, which arrives bit for bit."""
    made = torch.randn(RANKS, RANKS, elements).to(dtype)
    found = torch.zeros_like(made)

    def rank(own: int) -> None:
        others = [peer for peer in range(RANKS) if peer != own]
        send, receive = {peer: made[own, peer] for peer in others}, {peer: found[peer, own] for peer in others}
        exchange(links[own], send, receive, timeout_s=30, spins=spins)

    threads = [threading.Thread(target=rank, args=(own,)) for own in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for own in range(RANKS):
        made[own, own] = 0
    assert torch.equal(found, made)


@pytest.mark.parametrize("spins", [True, False])
def test_messages_arrive_whatever_their_size(links: list[Links], spins: bool) -> None:
    # The largest is more than a connection holds of what nobody has read.
    for elements, dtype in ((0, torch.float32), (1, torch.bfloat16), (1001, torch.float64), (3_000_001, torch.float32)):
        all_to_all(links, elements, spins=spins, dtype=dtype)


def test_silent_and_lost_ranks_are_network_errors(links: list[Links]) -> None:
    into = {1: torch.empty(4)}
    begun = time.monotonic()
    with pytest.raises(dist.DistNetworkError, match="Timed out"):
        exchange(links[0], {}, into, timeout_s=0.2, spins=False)
    # Nobody waits for the thirty seconds that others are given.
    assert time.monotonic() - begun < 30
    threading.Timer(0.2, links[1][0].shutdown, args=(socket.SHUT_RDWR,)).start()
    with pytest.raises(dist.DistNetworkError, match="Connection closed"):
        exchange(links[0], {}, into, timeout_s=30, spins=False)


def test_no_rank_has_any_where_one_could_not_be_reached() -> None:
    assert connected(Meeting(unreachable=0)) == [{}] * RANKS
