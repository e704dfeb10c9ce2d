"""Whose turn it is: those of higher priority first, and among equals users in turn."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

OLDEST_SHARE = 4
"""One part in so many of a pass goes to the prompt that has waited longest, whatever shorter ones come."""


class Waiting(Protocol):
    """What is known of a request."""

    @property
    def priority(self) -> int: ...
    @property
    def user(self) -> str: ...
    @property
    def arrival(self) -> int: ...


W = TypeVar("W", bound=Waiting)


@dataclass(frozen=True)
class Reader:
    """A prompt that is being read: `past` tokens are there, `left` are not; lower `arrival` came before."""

    priority: int
    user: str
    arrival: int
    past: int
    left: int


class Queue(Generic[W]):
    """Requests that wait: by priority, then by turns of users, then in the order in which they came."""

    def __init__(self) -> None:
        self._lines: dict[tuple[int, str], deque[W]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[W]:
        return (each for line in self._lines.values() for each in line)

    def add(self, request: W, *, first: bool = False) -> None:
        """Behind those of its priority and user, or before them."""
        line = self._lines.setdefault((request.priority, request.user), deque())
        line.appendleft(request) if first else line.append(request)
        self._length += 1

    def remove(self, request: W) -> None:
        """One of those that wait leaves."""
        key = (request.priority, request.user)
        self._lines[key].remove(request)
        self._length -= 1
        if not self._lines[key]:
            del self._lines[key]

    def head(self, running: Iterable[Waiting]) -> W | None:
        """Whose turn it is: of the highest priority the user who has least running, and then who came first."""
        if not self._lines:
            return None
        counts = Counter(each.user for each in running)
        top = max(priority for priority, _ in self._lines)
        heads = [line[0] for (priority, _), line in self._lines.items() if priority == top]
        return min(heads, key=lambda each: (counts[each.user], each.arrival))


def turns(readers: Sequence[Reader]) -> list[int]:
    """In which order prompts are read: users take turns, and of each the one with the least left is first."""
    by_length = sorted(range(len(readers)), key=lambda at: (readers[at].left, readers[at].arrival))
    seen: Counter[str] = Counter()
    places = {}
    for at in by_length:
        reader = readers[at]
        places[at] = (-reader.priority, seen[reader.user], reader.left, reader.arrival)
        seen[reader.user] += 1
    return sorted(by_length, key=places.__getitem__)


def allot(readers: Sequence[Reader], order: Sequence[int], total: int) -> list[int]:
    """So many tokens in that order; of the highest priority, the prompt that came first has its part in any case."""
    chunks = [0] * len(readers)
    top = max(reader.priority for reader in readers)
    oldest = min((at for at in order if readers[at].priority == top), key=lambda at: readers[at].arrival)
    chunks[oldest] = min(readers[oldest].left, -(-total // OLDEST_SHARE))
    rest = total - chunks[oldest]
    for at in order:
        more = min(rest, readers[at].left - chunks[at])
        chunks[at] += more
        rest -= more
    return chunks
