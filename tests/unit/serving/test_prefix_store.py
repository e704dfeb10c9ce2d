"""What a rank says of spans that come from disk."""

from concurrent.futures import Future

import pytest
import torch

from megakv.base.errors import MegaKVError
from megakv.serving.plan import Await, Load, StoredPart
from megakv.serving.worker import PrefixStore


class Folder:
    """Reads when told to."""

    def __init__(self) -> None:
        self.reading: Future[object] = Future()

    def read(self, part: StoredPart, device: torch.device) -> Future[object]:
        return self.reading


def test_a_span_is_here_only_once_it_was_read() -> None:
    folder = Folder()
    store = PrefixStore(torch.device("cpu"), folder)  # type: ignore[arg-type]
    # Planned, but no rank has begun: whoever awaited it now would keep streams waiting for the disk.
    assert not store.is_here(1)
    store.arrange(Load(1, StoredPart("0" * 24, 0, 1, 1)))
    assert not store.is_here(1)
    folder.reading.set_result(object())
    assert store.is_here(1)


@pytest.mark.parametrize("error", [MegaKVError("torn"), OSError("gone"), MemoryError(), ValueError("odd")])
def test_what_cannot_be_read_for_whatever_reason_is_done_without(error: Exception) -> None:
    folder = Folder()
    store = PrefixStore(torch.device("cpu"), folder)  # type: ignore[arg-type]
    store.arrange(Load(1, StoredPart("0" * 24, 0, 1, 1)))
    folder.reading.set_exception(error)
    assert store.receive(Await((1,))) == {1: str(error) or "MemoryError"}
    assert len(store) == 0 and not store.is_here(1)
