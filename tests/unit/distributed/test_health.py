"""Ranks hear of each other's failures and ends over connections of their own, whatever else connects them."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from megakv.distributed.health import MOST_GREETING, HealthChannel, accept_links, connect

SIZE = 4


class Gathering:
    """Gives every thread what all passed to it."""

    def __init__(self, size: int):
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size)

    def of(self, rank: int) -> Any:
        def gather(value: Any) -> list[Any]:
            self._values[rank] = value
            self._barrier.wait(30)
            values = list(self._values)
            self._barrier.wait(30)
            return values

        return gather


@pytest.fixture
def channels() -> Iterator[list[HealthChannel]]:
    """Of all ranks, each connected by a thread of its own; one of them first tries a host that is not there."""
    found: dict[int, HealthChannel] = {}
    gathering = Gathering(SIZE)

    def start(rank: int) -> None:
        hosts = ["nowhere.invalid", "127.0.0.1"] if rank == 1 else ["127.0.0.1"]
        found[rank] = connect(rank, gathering.of(rank), world_size=SIZE, hosts=hosts)

    starting = [threading.Thread(target=start, args=(rank,)) for rank in range(SIZE)]
    for thread in starting:
        thread.start()
    for thread in starting:
        thread.join()
    yield [found[rank] for rank in range(SIZE)]
    for channel in found.values():
        channel.close()


def heard(channel: HealthChannel) -> list[dict[str, Any]]:
    """The next messages."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if messages := channel.poll(0.1):
            return messages
    return []


def test_all_hear_what_one_tells(channels: list[HealthChannel]) -> None:
    hub, *others = channels
    message = {"kind": "failed", "rank": 2, "text": "a\nb \N{SNOWMAN}" * 1000}
    others[1].tell(message)
    assert heard(hub) == [message]
    assert heard(others[0]) == heard(others[2]) == [message]
    # Not the one that it came from.
    assert others[1].poll(0.1) == []
    hub.tell({"kind": "failed", "rank": 0})
    assert all(heard(other) == [{"kind": "failed", "rank": 0}] for other in others)


def test_a_lost_rank_and_one_that_ended_are_told_apart(channels: list[HealthChannel]) -> None:
    hub, *others = channels
    others[0].close()
    lost = [{"kind": "lost", "rank": 1}]
    assert heard(hub) == heard(others[1]) == heard(others[2]) == lost
    others[1].end()
    ended = [{"kind": "ended", "rank": 2}]
    assert heard(hub) == heard(others[2]) == ended
    hub.close()
    assert heard(others[2]) == [{"kind": "lost", "rank": 0}]
    assert not others[2].open


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_gives_itself_up_is_lost_to_all(channels: list[HealthChannel], rank: int) -> None:
    """Its process may go on for a while."""
    channels[rank].end(lost=True)
    lost = {"kind": "lost", "rank": rank}
    assert all(heard(other)[0] == lost for number, other in enumerate(channels) if number != rank)


def test_a_stranger_is_no_rank() -> None:
    gathering = Gathering(2)
    found: list[HealthChannel] = []

    def stranger(value: Any) -> list[Any]:
        values = gathering.of(1)(value)
        if values[0] not in (None, True, False):
            with socket.create_connection(("127.0.0.1", values[0][0])) as uninvited:
                uninvited.sendall(b"guess 1\n")
        return values

    def lead() -> None:
        found.append(connect(0, gathering.of(0), world_size=2, hosts=["127.0.0.1"]))

    leading = threading.Thread(target=lead)
    leading.start()
    rank = connect(1, stranger, world_size=2, hosts=["127.0.0.1"])
    leading.join()
    rank.tell({"kind": "failed", "rank": 1})
    assert heard(found[0]) == [{"kind": "failed", "rank": 1}]
    for channel in (rank, *found):
        channel.close()


def test_nobody_waits_for_a_stranger_who_sends_one_byte_at_a_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address, accepted, sent = listener.getsockname(), threading.Event(), [0]
        with socket.create_connection(address) as stranger, socket.create_connection(address) as rank:

            def dawdle() -> None:
                while sent[0] < MOST_GREETING and not accepted.wait(0.1):
                    stranger.sendall(b"x")
                    sent[0] += 1

            dawdling = threading.Thread(target=dawdle)
            dawdling.start()
            rank.sendall(b"token 1\n" + b'{"kind": "said at once"}\n')
            links = accept_links(listener, "token", 1)
            accepted.set()
            dawdling.join()
            assert sent[0] < MOST_GREETING
            channel = HealthChannel(0, links)
            assert heard(channel) == [{"kind": "said at once"}]
            channel.close()


WAITING = """
import socket, sys, threading, time
import megakv.distributed.peers
from megakv.distributed.health import HealthChannel
from megakv.distributed.peers import Peer, PeerWatch
megakv.distributed.peers.UNHEARD_SECONDS, megakv.distributed.peers.LOST_SECONDS = 2.0, 0.5
near, far = socket.socketpair()
ended = threading.Event()
watch = PeerWatch(0, [Peer.this(0), Peer(1, "there", 7, "")], 600, ended.set, HealthChannel(0, {1: near}))
before = watch.enter_wait("what goes on")
print(ended.wait(1.0))
watch.leave_wait(before)
far.close()
before = watch.enter_wait("what can be broken off")
print(ended.wait(60))
watch.leave_wait(before)
try:
    watch.check("the next step")
except megakv.base.errors.PeerLostError as error:
    print(error, flush=True)
watch.enter_wait("what is deaf")
time.sleep(1000)
"""


def test_a_lost_process_ends_what_waits_for_it_whatever_connects_them() -> None:
    done = subprocess.run([sys.executable, "-c", WAITING], capture_output=True, text=True, timeout=300, check=False)
    there = "rank 1 (host there, pid 7) was lost"
    assert done.stdout.splitlines() == ["False", "True", f"rank 0: {there} before the next step"], done.stderr
    assert done.returncode == 1
    assert f"megakv: rank 0 ends because {there} during what is deaf\n" in done.stderr
