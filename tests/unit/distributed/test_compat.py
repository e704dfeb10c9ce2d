"""Which device a rank takes."""

from typing import Any

import pytest

import megakv.distributed.compat
from megakv.base.errors import MegaKVError


class Accelerator:
    """What is asked of DeepSpeed's accelerator, on a host with four devices."""

    def __init__(self) -> None:
        self.taken: list[int] = []

    def device_name(self) -> str:
        return "cuda"

    def device_count(self) -> int:
        return 4

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]

    def set_device(self, index: int) -> None:
        self.taken.append(index)


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The accelerator of four devices, found by the library."""
    found = Accelerator()
    monkeypatch.setattr(megakv.distributed.compat, "get_accelerator", lambda: found)
    return found


def test_the_device_is_that_of_the_local_rank(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on each host of four devices: rank 3 of the world is the second one of its host."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "1")
    megakv.distributed.compat.take_device()
    assert accelerator.taken == [1]


def test_a_rank_without_a_device_is_refused(accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "4")
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(MegaKVError, match=r"LOCAL_RANK = 4, but this process sees 4 devices \(CUDA_VISIBLE_DEVICES\)"):
        megakv.distributed.compat.take_device()
    assert accelerator.taken == []
