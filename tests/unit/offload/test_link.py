"""The emulated link copies truly, in order, at its pace, and hands errors to whoever waits."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from megakv.base.errors import MegaKVError
from megakv.offload.cuda_link import make_link
from megakv.offload.link import EmulatedLink, Move, Place


class Gate:
    """Rows that are only there once somebody opens the gate."""

    nbytes = 4

    def __init__(self) -> None:
        self.open = threading.Event()

    def read_into(self, target: Tensor) -> None:
        assert self.open.wait(10)
        target.view(torch.float32).fill_(1)

    def write_from(self, source: Tensor) -> None:
        assert self.open.wait(10)


class Broken:
    """Rows whose file is gone."""

    nbytes = 4

    def read_into(self, target: Tensor) -> None:
        raise OSError("no space left on device")

    write_from = read_into


def moves(*pairs: tuple[Tensor, Tensor]) -> list[Move]:
    return [Move.of(host, device) for host, device in pairs]


def test_rows_arrive_as_they_were() -> None:
    link = EmulatedLink()
    hosts = [torch.randn(n, 5) for n in (1, 7, 100)]
    devices = [torch.zeros_like(host) for host in hosts]
    link.start("in", moves(*zip(hosts, devices, strict=True))).wait()
    for host, device in zip(hosts, devices, strict=True):
        assert torch.equal(host, device)
    back = torch.zeros_like(hosts[1])
    link.start("out", moves((back, devices[1]))).wait()
    assert torch.equal(back, hosts[1])
    assert link.traffic["in"].nbytes == 108 * 5 * 4 and link.traffic["out"].nbytes == 7 * 5 * 4
    link.close()


def test_one_direction_keeps_its_order_and_the_other_goes_on() -> None:
    link, gate = EmulatedLink(), Gate()
    target, later = torch.zeros(1, 1), torch.zeros(1, 1)
    first = link.start("in", [Move.of(gate, target)])
    second = link.start("in", moves((torch.ones(1, 1), later)))
    other = link.start("out", moves((torch.zeros(1, 1), torch.ones(1, 1))))
    other.wait()
    assert not first.done and not second.done and later.item() == 0
    gate.open.set()
    second.wait()
    assert first.done and later.item() == 1
    link.close()


def test_a_transfer_waits_for_those_that_wrote_what_it_reads() -> None:
    link, gate, place = EmulatedLink(), Gate(), Place()
    written = torch.zeros(1, 1)
    slow = link.start("out", [Move.of(gate, torch.ones(1, 1))])
    link.start("out", [Move.of(written, torch.full((1, 1), 3.0), [place])])
    read = torch.zeros(1, 1)
    reading = link.start("in", [Move.of(written, read, [place])])
    time.sleep(0.02)
    assert not slow.done and not reading.done and len(place.busy) == 2
    gate.open.set()
    reading.wait()
    assert read.item() == 3 and not place.busy
    link.close()


def test_a_transfer_waits_for_those_that_read_what_it_writes() -> None:
    link, gate, place = EmulatedLink(), Gate(), Place()
    link.start("in", [Move.of(gate, torch.ones(1, 1))])
    written, read = torch.ones(1, 1), torch.zeros(1, 1)
    reading = link.start("in", [Move.of(written, read, [place])])
    writing = link.start("out", [Move.of(written, torch.full((1, 1), 3.0), [place])])
    time.sleep(0.02)
    assert not reading.done and not writing.done
    gate.open.set()
    writing.wait()
    assert read.item() == 1 and written.item() == 3
    link.close()


def test_errors_reach_the_waiter_and_the_link_goes_on() -> None:
    link = EmulatedLink()
    place = Place()
    broken = link.start("out", [Move.of(Broken(), torch.zeros(1, 1), [place])])
    depending = link.start("in", [Move.of(torch.zeros(1, 1), torch.zeros(1, 1), [place])])
    with pytest.raises(MegaKVError, match="no space left"):
        broken.wait()
    # Also long after it has failed.
    later = link.start("in", [Move.of(torch.zeros(1, 1), torch.zeros(1, 1), [place])])
    for transfer in (broken, depending, later):
        with pytest.raises(MegaKVError, match="transfer of 4 bytes failed.*no space left"):
            transfer.wait()
    target = torch.zeros(3, 2)
    link.start("in", moves((torch.ones(3, 2), target))).wait()
    assert target.sum() == 6
    link.close()


def test_a_buffer_in_flight_is_not_written_again() -> None:
    link, gate = EmulatedLink(), Gate()
    target = torch.zeros(1, 1)
    first = link.start("in", [Move.of(gate, target)])
    with pytest.raises(AssertionError, match="used again"):
        link.start("in", moves((torch.ones(1, 1), target)))
    gate.open.set()
    first.wait()
    link.start("in", moves((torch.full((1, 1), 5.0), target))).wait()
    assert target.item() == 5
    link.close()


def test_the_pace_is_kept() -> None:
    link = EmulatedLink(200e6)
    host = torch.randn(1000, 5000)
    begun = time.perf_counter()
    transfers = [link.start("in", moves((host[part::4].contiguous(), torch.empty(250, 5000)))) for part in range(4)]
    for transfer in transfers:
        transfer.wait()
    taken = time.perf_counter() - begun
    # A busy machine may be slower, never faster.
    assert taken >= 0.1
    assert link.traffic["in"].busy_s >= 0.09
    link.close()


def test_a_stress_of_both_directions_corrupts_nothing() -> None:
    link = EmulatedLink()
    generator = torch.Generator().manual_seed(3)
    host = torch.randn(64, 33, generator=generator)
    expected, buffers = host.clone(), [torch.empty(16, 33) for _ in range(2)]
    held: list = [None, None]
    place = Place()
    for step in range(1000):
        slot, first = step % 2, int(torch.randint(0, 49, (1,), generator=generator))
        if held[slot] is not None:
            held[slot].wait()
        link.start("in", [Move.of(host[first : first + 16], buffers[slot], [place])]).wait()
        assert torch.equal(buffers[slot], expected[first : first + 16])
        new = torch.randn(1, 33, generator=generator)
        expected[first] = new[0]
        held[slot] = link.start("out", [Move.of(host[first : first + 1], new, [place])])
    link.close()
    assert torch.equal(host, expected)


def test_impossible_links_are_refused() -> None:
    with pytest.raises(ValueError, match="0 bytes per second"):
        EmulatedLink(0)
    with pytest.raises(ValueError, match="emulated_link_gb_s"):
        make_link(torch.device("cuda"), 1.0)


def test_a_thread_that_cannot_be_made_ready_is_no_hang() -> None:
    def refuse() -> None:
        raise ValueError("no such device")

    link = EmulatedLink()
    link.close()
    link._threads["in"] = ThreadPoolExecutor(1, initializer=refuse)
    transfer = link.start("in", moves((torch.ones(3), torch.zeros(3))))
    with pytest.raises(MegaKVError, match="a transfer of 12 bytes failed"):
        transfer.wait()
    link.close()
