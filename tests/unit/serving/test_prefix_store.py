"""What a rank says of spans that come from disk."""

from concurrent.futures import Future

import torch

from megakv.serving.plan import Load, StoredPart
from megakv.serving.prefix_store import PrefixStore


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
