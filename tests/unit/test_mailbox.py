"""Small messages through memory that several ranks see."""

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megakv.distributed import mailbox
from megakv.distributed.mailbox import SLOT_BYTES, Mailbox, load_mailbox, make_mailbox

RANKS = 3


@pytest.fixture(autouse=True)
def compiled() -> None:
    if load_mailbox()[0] is None:
        pytest.skip(f"no compiled calls: {load_mailbox()[1]}")


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


def boxes(groups: list[list[int]], *, wanted: Callable[[int], bool] = lambda _: True) -> list[Mailbox | None]:
    """Those of all ranks, which are in one group each."""
    meeting = Meeting(sum(map(len, groups)))

    def made(rank: int) -> Mailbox | None:
        group = next(group for group in groups if rank in group)
        gather = lambda value: meeting.gather(rank, value)  # noqa: E731
        return make_mailbox(group, group.index(rank), gather, wanted=wanted(rank))

    return on_threads(sum(map(len, groups)), made)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert not [name for name in os.listdir(mailbox.FOLDER) if name.startswith(f"megakv-{os.getpid()}-")]


def test_messages_of_all_sizes_and_types_come_in_their_order() -> None:
    found, kinds = boxes([list(range(RANKS))]), (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
    drawn = [(int(torch.randint(0, 3000, ())), kinds[int(torch.randint(len(kinds), ()))]) for _ in range(300)]
    sizes = [*drawn, (SLOT_BYTES, torch.uint8), (0, torch.float32), (1, torch.uint8)]
    sent = [[(torch.randn(size) * 9).to(kind) for size, kind in sizes] for _ in range(RANKS)]

    def exchange(own: int) -> list[torch.Tensor]:
        box, received = found[own], []
        assert box is not None
        for message in sent[own]:
            # Some are late.
            if torch.rand(()) < 0.02:
                time.sleep(0.003)
            received.append(message.new_empty((RANKS, *message.shape)))
            box.all_gather(message, received[-1], {}, timeout_s=30)
        return received

    for received in on_threads(RANKS, exchange):
        assert not isinstance(received, Exception), received
        for index, whole in enumerate(received):
            assert torch.equal(whole, torch.stack([own[index] for own in sent]))


def test_groups_have_their_own() -> None:
    found = boxes([[0, 2], [1, 3]])

    def exchange(own: int) -> list[int]:
        box, received = found[own], torch.zeros(2, 1, dtype=torch.int64)
        assert box is not None
        box.all_gather(torch.tensor([own]), received, {}, timeout_s=30)
        return received.flatten().tolist()

    assert on_threads(4, exchange) == [[0, 2], [1, 3], [0, 2], [1, 3]]


def test_who_does_not_come_is_waited_for_no_longer_than_said() -> None:
    box, begun = boxes([[0, 1]])[0], time.monotonic()
    assert box is not None
    with pytest.raises(dist.DistNetworkError, match=r"Timed out after 0\.3 s"):
        box.all_gather(torch.zeros(4), torch.zeros(2, 4), {}, timeout_s=0.3)
    assert 0.3 <= time.monotonic() - begun < 10


def test_who_is_gone_is_noticed() -> None:
    """By the connection that ended with it."""
    box, (here, there) = boxes([[0, 1]])[0], socket.socketpair()
    assert box is not None
    with here, there:
        here.setblocking(False)
        threading.Timer(0.2, there.close).start()
        begun = time.monotonic()
        with pytest.raises(dist.DistNetworkError, match="Connection closed by rank 1"):
            box.all_gather(torch.zeros(4), torch.zeros(2, 4), {1: here}, timeout_s=60)
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("reason", ["not wanted", "no folder", "no memory"])
def test_none_has_one_where_one_cannot(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason == "no folder":
        monkeypatch.setattr(mailbox, "FOLDER", mailbox.FOLDER / "megakv-nowhere")
    if reason == "no memory":
        monkeypatch.setattr(mailbox, "SLOT_BYTES", 1 << 50)
    assert boxes([[0, 1, 2]], wanted=lambda rank: rank != 1 or reason != "not wanted") == [None] * 3


def test_a_meeting_that_fails_leaves_no_memory() -> None:
    def gather(_: Any) -> list[Any]:
        raise dist.DistNetworkError("Connection closed")

    with pytest.raises(dist.DistNetworkError):
        make_mailbox([0, 1], 0, gather)
