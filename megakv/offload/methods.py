"""The registry of offload methods, the plainest first: of equal ones `auto` takes the first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from megakv.base.registry import Registry

if TYPE_CHECKING:
    from megakv.offload.method import OffloadMethod

METHODS: Registry[OffloadMethod] = Registry(
    "offload method",
    {
        "stream": "megakv.offload.stream:Stream",
        "kvpr": "megakv.offload.kvpr:KVPR",
        "chunked": "megakv.offload.chunked:Chunked",
        "cpu_rank": "megakv.offload.cpu_rank:CPURank",
        "all": "megakv.offload.cpu_rank:All",
    },
    make=lambda kind: kind(),
)
AUTO = "auto"
"""The fastest of all of them."""


def methods_of(name: str) -> Mapping[str, OffloadMethod]:
    """Those that ``megakv.offload.method`` asks for."""
    return METHODS if name == AUTO else {name: METHODS[name]}
