"""Who is served next, and how much of each prompt a pass reads, so that nobody's stream stalls.

Those of higher priority are admitted first, and among equals users take turns. Every pass has one token of each stream
and as much of prompts as keeps it within the gap that is allowed; where decoding is to keep a share of the time,
passes of decoding alone come in between.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from megakv.serving.pass_times import PassSize, PassTimes
from megakv.serving.settings import ServingSettings

LEAST_CHUNK = 16
"""New prompt tokens that a pass has in any case, however long it takes."""
GAP_SHARE = 0.9
"""Part of the gap that a pass is planned to take: planning and handing out tokens take some, too."""
IDLE_GAPS = 4
"""Where nothing decodes, a pass may take so many gaps: small passes cost more, and only newcomers wait for it."""
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


class Scheduler:
    """How large the next pass is, for the settings and the times of passes so far."""

    def __init__(self, settings: ServingSettings, times: PassTimes):
        self._settings, self._times = settings, times
        # Seconds that decoding is behind its share.
        self._owed = 0.0

    def measured(self, size: PassSize, seconds: float, *, reading: bool) -> None:
        """A pass took so long; `reading` says whether a prompt was to be read at that time."""
        if size.sequences and reading:
            alone = self._times.seconds(PassSize(sequences=size.sequences, context=size.context))
            if not size.prompt_tokens or not alone:
                alone = seconds
            # It advanced every stream by a token, for which decoding alone takes so long.
            self._owed = max(0.0, self._owed + self._settings.decode_share * seconds - alone)
        else:
            self._owed = 0.0
        self._times.add(size, seconds)

    def chunks(self, readers: Sequence[Reader], decoding: PassSize) -> list[int]:
        """How many new tokens of each prompt the next pass reads, given what of it decodes."""
        if not readers:
            return []
        if decoding.sequences and self._owed > 0:
            return [0] * len(readers)
        order = turns(readers)
        limit = min(self._settings.chunk_tokens, self._times.trusted_prompt, sum(reader.left for reader in readers))
        gaps = GAP_SHARE if decoding.sequences else IDLE_GAPS
        allowed = self._settings.max_gap_s * gaps / self._times.margin

        def fits(total: int) -> bool:
            size = decoding
            for reader, new in zip(readers, allot(readers, order, total), strict=True):
                size = size.with_prompt(reader.past, new)
            return self._times.seconds(size) <= allowed

        return allot(readers, order, _largest(min(LEAST_CHUNK, limit), limit, fits))


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


def _largest(least: int, most: int, fits: Callable[[int], bool]) -> int:
    """The largest number that fits, and `least` in any case."""
    low, high = least, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
