"""The registry of offload methods, the plainest first: of equal ones `auto` takes the first."""

from __future__ import annotations

from megakv.offload.chunked import Chunked
from megakv.offload.cpu_rank import All, CPURank
from megakv.offload.kvpr import KVPR
from megakv.offload.method import OffloadMethod
from megakv.offload.stream import Stream

METHODS: dict[str, OffloadMethod] = {
    "stream": Stream(),
    "kvpr": KVPR(),
    "chunked": Chunked(),
    "cpu_rank": CPURank(),
    "all": All(),
}
AUTO = "auto"
"""The fastest of all of them."""


def methods_of(name: str) -> dict[str, OffloadMethod]:
    """Those that ``megakv.offload.method`` asks for."""
    return METHODS if name == AUTO else {name: METHODS[name]}
