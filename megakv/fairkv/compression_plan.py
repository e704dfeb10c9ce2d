"""A pass as compression sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from megakv.cache.cache import ShardedCache
from megakv.costmodel.context_parallel import Workload
from megakv.fairkv.observation import Turn

T = TypeVar("T")


@dataclass(frozen=True)
class CompressionPlan:
    """Sequences that a pass compresses, and what it looks at to compress later; by default nothing."""

    turn: Turn | None = None
    """The turn that its tokens belong to, where some of it may be compressed at its end."""
    compress: tuple[int, ...] = ()
    """Sequences of which each layer compresses that turn after its attention, as it ends with this pass."""
    evict: tuple[int, ...] = ()
    """Sequences of which each layer compresses everything that it holds, after that."""
    watched: bool = False
    """Whether the positions that its queries look at may decide what is evicted, now or later."""

    @property
    def scored(self) -> bool:
        """Whether the queries of this pass give scores."""
        return self.turn is not None or self.watched

    @property
    def idle(self) -> bool:
        """Whether nothing is compressed, now or later, by this pass."""
        return not self.scored and not self.evict


class ObservedPass(Protocol):
    """Pass whose queries are observed."""

    @property
    def cache(self) -> ShardedCache: ...
    @property
    def compression(self) -> CompressionPlan: ...
    @property
    def workload(self) -> Workload | None: ...
    @property
    def slots(self) -> int: ...
    @property
    def batch(self) -> int: ...
    def once(self, key: Any, make: Callable[[], T]) -> T:
        """The value of a key, made by the first layer that asks."""
        ...
