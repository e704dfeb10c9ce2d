"""The link in streams, on an accelerator made of threads: order, files beside computation, errors, and times."""

from __future__ import annotations

import copy
import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megakv.base.errors import MegaKVError
from megakv.offload import cuda_link, runtime
from megakv.offload.cuda_link import CudaStreams, StreamLink
from megakv.offload.disk import DiskTier
from megakv.offload.host_memory import HostTier
from megakv.offload.link import Move, Place
from tests.unit.offload.streams import Ahead, ThreadStreams
from tests.unit.offload.test_exactness import generate, plain_model, ragged


class Gate:
    """Rows of ones that are only there once somebody opens the gate, or never."""

    def __init__(self, nbytes: int = 4, *, broken: bool = False):
        self.nbytes, self.broken = nbytes, broken
        self.open = threading.Event()

    def read_into(self, target: Tensor) -> None:
        assert self.open.wait(10)
        if self.broken:
            raise OSError("no such rows")
        target.view(torch.float32).fill_(1)

    def write_from(self, source: Tensor) -> None:
        self.read_into(torch.empty_like(source))

    def part(self, first: int, nbytes: int) -> Gate:
        assert (first, nbytes) == (0, self.nbytes)
        return self


@pytest.fixture
def ahead() -> ThreadStreams:
    """An accelerator that computes behind its thread."""
    return ThreadStreams(Ahead())


@pytest.fixture
def link(ahead: ThreadStreams, monkeypatch: pytest.MonkeyPatch) -> Iterator[StreamLink]:
    """Its link, with small buffers for files."""
    monkeypatch.setattr(cuda_link, "PINNED_BYTES", 1000)
    made = StreamLink(ahead)
    yield made
    made.close()


def moves(*pairs: tuple[Tensor, Tensor]) -> list[Move]:
    return [Move.of(host, device) for host, device in pairs]


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("link-")}


def test_rows_go_both_ways_and_only_files_take_a_thread(link: StreamLink, tmp_path: Path) -> None:
    memory, disk = HostTier(20000), DiskTier(20000, tmp_path)
    before = threads()
    rows = [torch.randn(count, 5) for count in (1, 77, 200, 0)]
    for tiers in ((memory, memory, memory, memory), (disk, memory, disk, disk), (disk, disk, disk, memory)):
        places, offset, held = [], 0, [Place()]
        for tier, data in zip(tiers, rows, strict=True):
            places.append(tier.rows(offset, len(data), 5, data.dtype))
            offset += data.nbytes
        out = link.start("out", [Move.of(place, data, held) for place, data in zip(places, rows, strict=True)])
        found = [torch.zeros_like(data) for data in rows]
        back = link.start("in", [Move.of(place, data, held) for place, data in zip(places, found, strict=True)])
        back.settle()
        assert out.done and back.done and all(map(torch.equal, found, rows))
        assert (threads() - before != set()) == (disk in tiers)
    assert link.traffic["out"].nbytes == link.traffic["in"].nbytes == 3 * 278 * 20
    memory.close()
    disk.close()


def test_computation_comes_before_and_behind_and_nobody_waits(link: StreamLink, ahead: ThreadStreams) -> None:
    slow, host, device, found = threading.Event(), torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3, 2)
    ahead.compute.put(lambda: slow.wait(10) and device.fill_(7))
    back, place = torch.zeros(3, 2), [Place()]
    out = link.start("out", [Move.of(host, device, place)])
    came = link.start("in", [Move.of(host, back, place)])
    came.wait()
    ahead.compute.put(lambda: found.copy_(back))
    assert not out.done and not came.done and host.sum() == 0
    slow.set()
    ahead.compute.synchronize()
    assert out.done and torch.equal(found, torch.full((3, 2), 7.0))


def test_what_comes_behind_a_file_keeps_its_turn(link: StreamLink) -> None:
    gate, target, later, other = Gate(), torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1)
    first = link.start("in", [Move.of(gate, target)])
    place = [Place()]
    second = link.start("in", [Move.of(torch.ones(1, 1), later, place)])
    out = link.start("out", moves((other, torch.ones(1, 1))))
    out.settle()
    # What must come after something that a thread is still to do waits there, too.
    third = link.start("out", [Move.of(torch.zeros(1, 1), torch.ones(1, 1), place)])
    assert not first.done and not second.done and not third.done and later.item() == 0 and other.item() == 1
    gate.open.set()
    third.settle()
    second.settle()
    assert first.done and target.item() == later.item() == 1


def test_errors_reach_the_waiter_and_the_link_goes_on(link: StreamLink) -> None:
    gate, memory = Gate(broken=True), torch.zeros(1, 1)
    place = [Place()]
    broken = link.start("out", [*moves((memory, torch.ones(1, 1))), Move.of(gate, torch.zeros(1, 1), place)])
    depending = link.start("in", [Move.of(torch.zeros(1, 1), torch.zeros(1, 1), place)])
    gate.open.set()
    with pytest.raises(MegaKVError, match="no such rows"):
        broken.wait()
    # Also long after it has failed.
    later = link.start("in", [Move.of(torch.zeros(1, 1), torch.zeros(1, 1), place)])
    for transfer in (broken, depending, later):
        with pytest.raises(MegaKVError, match=r"transfer of \d bytes failed.*no such rows"):
            transfer.wait()
        with pytest.raises(MegaKVError, match="no such rows"):
            transfer.settle()
        assert transfer.done
    target = torch.zeros(3, 2)
    link.start("in", moves((torch.ones(3, 2), target))).settle()
    assert target.sum() == 6 and link.traffic["in"].timed_bytes == 24


def test_transfers_are_timed_when_they_have_ended(link: StreamLink, ahead: ThreadStreams) -> None:
    slow, rows = threading.Event(), torch.randn(500, 100)
    ahead.compute.put(lambda: slow.wait(10))
    transfer = link.start("in", moves((rows, torch.empty_like(rows))))
    traffic = link.traffic["in"]
    assert traffic.nbytes == rows.nbytes and traffic.timed_bytes == 0 and traffic.busy_s == 0
    slow.set()
    transfer.settle()
    assert link.traffic["in"] is traffic and traffic.timed_bytes == rows.nbytes and 0 < traffic.busy_s < 0.5


def test_a_stress_of_both_directions_corrupts_nothing(link: StreamLink, ahead: ThreadStreams, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    disk, width = DiskTier(64 * 132, tmp_path), 33
    host = torch.randn(64, width, generator=generator)
    link.start("out", [Move.of(disk.rows(0, 64, width, host.dtype), host.clone())]).settle()
    expected, buffers, wrong = host.clone(), [torch.empty(16, width) for _ in range(2)], []
    held_in = [Place() for _ in range(64)]
    for step in range(1000):
        on_disk, first = bool(step % 3), int(torch.randint(0, 49, (1,), generator=generator))
        target = buffers[step % 2]
        # Rows lie in memory and in a file: those that are written last are in both.
        source = disk.rows(first * 132, 16, width, host.dtype) if on_disk else host[first : first + 16]
        link.start("in", [Move.of(source, target, held_in[first : first + 16])]).wait()
        held = expected[first : first + 16].clone()
        ahead.compute.put(lambda target=target, held=held: wrong.append(not torch.equal(target, held)))
        new = torch.randn(1, width, generator=generator)
        expected[first] = new[0]
        places = [host[first : first + 1], disk.rows(first * 132, 1, width, host.dtype)]
        last = link.start("out", [Move.of(place, new, [held_in[first]]) for place in places])
    ahead.compute.synchronize()
    last.settle()
    assert len(wrong) == 1000 and not any(wrong)
    found = torch.empty(64, width)
    link.start("in", [Move.of(disk.rows(0, 64, width, host.dtype), found)]).settle()
    assert torch.equal(host, expected) and torch.equal(found, expected)
    disk.close()


@pytest.mark.usefixtures("fixed_costs")
@pytest.mark.parametrize(("method", "weights"), [("stream", False), ("auto", False), ("stream", "disk")])
def test_tokens_are_the_plain_model_s_over_both_tiers(
    method: str, weights: Any, offloaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "make_link", lambda *_: StreamLink(ThreadStreams()))
    monkeypatch.setattr(cuda_link, "PINNED_BYTES", 3000)
    model = plain_model("opt")
    ids, mask = ragged(4)
    expected = generate(model, ids, mask)
    places = {"host_gb": 12 * 8192 / (1 << 30), "disk_gb": 0.01, "disk_path": str(tmp_path)}
    engine = offloaded(copy.deepcopy(model), method=method, weights=weights, num_gpu_batches=2, **places)
    for _ in range(2):
        assert torch.equal(generate(engine, ids, mask), expected)
    assert engine._offloader.pool.used()["disk"]


def test_costs_are_learned_behind_the_steps(offloaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    streams = ThreadStreams()
    monkeypatch.setattr(runtime, "make_link", lambda *_: StreamLink(streams))
    engine = offloaded(plain_model("opt"), method="chunked")
    log, clock = engine._offloader._log, engine._offloader.link.clock
    passed, marks = clock.passed, []

    def late(mark: Any) -> bool:
        """The accelerator is two steps behind."""
        if mark not in marks:
            marks.append(mark)
        return marks.index(mark) < len(log._steps) - 2 and passed(mark)

    monkeypatch.setattr(clock, "passed", late)
    ids = torch.randint(3, 190, (2, 40), generator=torch.Generator().manual_seed(1))
    generate(engine, ids, torch.ones_like(ids), max_new_tokens=12, min_new_tokens=12)
    rates, steps = engine._offloader.rates, engine._offloader.steps
    assert len(steps) == 11 and len(log._unread) == 2
    assert len(rates._steps["device"]) == sum(step.usual and not step.profiled for step in steps[:-2])
    assert all(step.measured_s > 0 and step.waited_s >= 0 for step in steps[1:-2])
    assert 0 < sum(step.traffic.timed_bytes for step in steps) <= engine._offloader.link.traffic["in"].nbytes
    assert all(step.recompute_s > 0 for step in steps[:-2] if step.split.recomputed)
    assert rates["device_s"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU its memory is pinned")
def test_what_files_pass_through_is_pageable_where_pinning_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    memory = CudaStreams(torch.device("cuda")).pinned(1 << 20)
    assert memory.nbytes == 1 << 20 and memory.device.type == "cpu" and not memory.is_pinned()
    assert "pinning host memory failed for 1.00 MiB that rows of files pass through" in caplog.text


def test_copies_go_to_the_driver_one_by_one_and_what_it_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, queue = CudaStreams(torch.device("cpu")), SimpleNamespace(cuda_stream=7)
    source, target = torch.randn(3, 5), torch.zeros(3, 5)
    ends = [np.array([row.data_ptr() for row in rows]) for rows in (target, source)]
    refused: list[int] = []

    def memcpy(to: int, given: int, nbytes: int, stream: int) -> int:
        assert stream == 7
        ctypes.memmove(to, given, nbytes)
        return 201 if refused and to == refused[0] else 0

    monkeypatch.setitem(vars(streams), "_memcpy", memcpy)
    streams.copy(queue, *ends, np.array([20, 20, 12]), [target])
    assert torch.equal(target[:2], source[:2]) and torch.equal(target[2, :3], source[2, :3]) and not target[2, 3:].any()
    refused.append(target[1].data_ptr())
    with pytest.raises(RuntimeError, match=r"refused a copy of 20 bytes \(error 201\)"):
        streams.copy(queue, *ends, np.array([20, 20, 20]), [target])
