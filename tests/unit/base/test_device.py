"""Freed blocks are used again once the allocator has settled."""

import platform
import subprocess
import sys

import pytest

SCRIPT = """
import resource, torch
from megakv.base.device import settle_allocator

settle_allocator()
for repeat in range(8):
    if repeat == 4:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(1 << 20) for _ in range(6)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults() -> int:
    result = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True)
    return int(result.stdout.split()[-1])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's allocator")
def test_settled_allocator_reuses_its_pages() -> None:
    # Six blocks of 4 MiB, four times, in pages of 4 KiB: 24,576 if none is used again. How many of them an unsettled
    # process faults depends on what it happened to free before.
    assert faults() < 4 * 6 * 1024 / 10
