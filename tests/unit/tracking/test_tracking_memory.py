import mmap
import sys

import pytest
import torch

import megakv.tracking.machine as machine
from megakv.tracking.machine import peak_memory_bytes, reset_peak_memory

MIB = 2**20


@pytest.mark.skipif(sys.platform != "linux", reason="the peak can be reset only on Linux")
def test_peak_rises_with_an_allocation_and_can_be_reset():
    if not reset_peak_memory():
        pytest.skip("/proc/self/clear_refs is not writable here")
    before = peak_memory_bytes("cpu")
    # A mapping of its own: an allocator may have room left from other tests.
    block = mmap.mmap(-1, 96 * MIB)
    for _ in range(96):
        block.write(b"x" * MIB)
    risen = peak_memory_bytes(torch.device("cpu"))
    assert 90 * MIB < risen - before < 160 * MIB
    block.close()
    # Linux counts resident pages per thread and sums them up lazily: a little may be missing.
    assert peak_memory_bytes() >= risen - MIB, "a peak outlives what caused it"
    assert reset_peak_memory()
    assert peak_memory_bytes() < risen - 60 * MIB


def test_without_proc_the_peak_of_the_whole_process_is_reported(monkeypatch, tmp_path):
    present = peak_memory_bytes()
    monkeypatch.setattr(machine, "_PROC", tmp_path / "absent")
    assert reset_peak_memory() is False
    # getrusage never forgets, so it is at least what the resettable mark says, give or take a page count.
    assert peak_memory_bytes() > 0.9 * present
