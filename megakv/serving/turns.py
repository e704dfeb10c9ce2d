"""Whose turn it is: those of higher priority first, and among equals whoever was served least lately."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

WINDOW_TOKENS = 1 << 17
"""After so many tokens all that was served before counts half: about one long prompt. It bounds how long those wait
who were served more than others."""
MOST_GONE = 1024
"""Names that are remembered on a level, the last to leave, when none of their requests is there any more."""


class Asker(Protocol):
    """Who asks: a user of a key."""

    @property
    def key(self) -> str: ...
    @property
    def user(self) -> str: ...


Served = tuple[float, float]
"""Tokens that a key was served lately, and its user of them: keys are compared first."""


@dataclass
class _Member:
    served: float = 0.0
    requests: int = 0
    users: _Level | None = None


@dataclass
class _Level:
    """Those among whom turns are taken: keys, or the users of one."""

    present: dict[str, _Member] = field(default_factory=dict)
    gone: dict[str, _Member] = field(default_factory=dict)
    fresh: float = 0.0
    """Tokens served since the last halving."""

    def enter(self, name: str) -> _Member:
        """A request more; a name that was not there begins at the least of those present, and waits for no longer."""
        member = self.present.get(name)
        if member is None:
            member = self.gone.pop(name, None) or _Member()
            member.served = max(member.served, min((each.served for each in self.present.values()), default=0.0))
            self.present[name] = member
        member.requests += 1
        return member

    def leave(self, name: str) -> None:
        """A request less."""
        member = self.present[name]
        member.requests -= 1
        if not member.requests:
            self.gone[name] = self.present.pop(name)
            if len(self.gone) > MOST_GONE:
                del self.gone[next(iter(self.gone))]

    def serve(self, name: str, tokens: float) -> None:
        """Tokens were computed for a name that is present."""
        self.present[name].served += tokens
        self.fresh += tokens
        if self.fresh >= WINDOW_TOKENS:
            self.fresh = 0.0
            for member in (*self.present.values(), *self.gone.values()):
                member.served /= 2


class Shares:
    """Shares of the tokens that are computed: equal ones for keys, and within a key for its users.

    Start-time fair queueing over tokens: users that have nothing to ask save nothing up, and however many users a key
    names, its share stays that of one key.
    """

    def __init__(self) -> None:
        self._keys = _Level()

    def enter(self, asker: Asker) -> None:
        """A request has come."""
        member = self._keys.enter(asker.key)
        member.users = member.users or _Level()
        member.users.enter(asker.user)

    def leave(self, asker: Asker) -> None:
        """A request has ended."""
        self._users(asker).leave(asker.user)
        self._keys.leave(asker.key)

    def serve(self, asker: Asker, tokens: float) -> None:
        """Tokens were computed for a request that is there."""
        self._keys.serve(asker.key, tokens)
        self._users(asker).serve(asker.user, tokens)

    def of(self, asker: Asker) -> Served:
        """What the key and the user of a request that is there were served lately."""
        return self._keys.present[asker.key].served, self._users(asker).present[asker.user].served

    def _users(self, asker: Asker) -> _Level:
        users = self._keys.present[asker.key].users
        assert users is not None
        return users


class Claims:
    """Tokens that requests will be served before another one is looked at, by key and by user."""

    def __init__(self) -> None:
        self._tokens: Counter[tuple[str, ...]] = Counter()

    def add(self, asker: Asker, tokens: int) -> None:
        """Claim tokens."""
        self._tokens[asker.key,] += tokens
        self._tokens[asker.key, asker.user] += tokens

    def behind(self, asker: Asker, served: Served) -> Served:
        """What somebody who was served so much lately will have been served by then."""
        return served[0] + self._tokens[asker.key,], served[1] + self._tokens[asker.key, asker.user]


TURN_TOKENS = 1 << 14
"""Who was served more lately by less than this reads on, if less is left of that prompt: one prompt after the other is
sooner for both."""
OLDEST_SHARE = 4
"""One part in so many of a pass goes to the prompt that has waited longest, whatever shorter ones come."""


class Waiting(Protocol):
    """What is known of a request."""

    @property
    def priority(self) -> int: ...
    @property
    def key(self) -> str: ...
    @property
    def user(self) -> str: ...
    @property
    def arrival(self) -> int: ...
    @property
    def ahead(self) -> int: ...


W = TypeVar("W", bound=Waiting)


@dataclass(frozen=True)
class Reader:
    """A prompt that is being read: `past` tokens are there, `left` are not; lower `arrival` came before.

    `served` is what its key and its user were served lately.
    """

    priority: int
    user: str
    arrival: int
    past: int
    left: int
    key: str = ""
    served: Served = (0.0, 0.0)


class Queue(Generic[W]):
    """Requests that wait: by priority, then by turns of keys and of their users, then in the order of arrival."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._lines: dict[tuple[int, str, str], deque[W]] = {}
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[W]:
        return (each for line in self._lines.values() for each in line)

    def add(self, request: W, *, first: bool = False) -> None:
        """Behind those of its priority and user, or before them."""
        line = self._lines.setdefault((request.priority, request.key, request.user), deque())
        line.appendleft(request) if first else line.append(request)
        self._length += 1

    def remove(self, request: W) -> None:
        """One of those that wait leaves."""
        name = (request.priority, request.key, request.user)
        self._lines[name].remove(request)
        self._length -= 1
        if not self._lines[name]:
            del self._lines[name]

    def head(self, running: Iterable[Waiting]) -> W | None:
        """Whose turn it is: of the highest priority, who was served least lately, counting what is still to come of
        those that run; and then who came first.
        """
        if not self._lines:
            return None
        claims = Claims()
        for each in running:
            claims.add(each, each.ahead)
        top = max(priority for priority, _, _ in self._lines)
        heads = [line[0] for (priority, _, _), line in self._lines.items() if priority == top]
        return min(heads, key=lambda each: (*claims.behind(each, self._shares.of(each)), each.arrival))


def turns(readers: Sequence[Reader]) -> list[int]:
    """The order in which prompts are read: priorities, then by turns as in a queue, and of each user the one with the
    least left is first.
    """
    lines: dict[tuple[int, str, str], deque[int]] = {}
    for at in sorted(range(len(readers)), key=lambda at: (readers[at].left, readers[at].arrival)):
        lines.setdefault((readers[at].priority, readers[at].key, readers[at].user), deque()).append(at)
    claims: dict[int, Claims] = defaultdict(Claims)

    def place(line: deque[int]) -> tuple[float, ...]:
        reader = readers[line[0]]
        key, user = claims[reader.priority].behind(reader, (0, 0))
        by_key, by_user = (served // TURN_TOKENS for served in reader.served)
        return -reader.priority, by_key, key, by_user, user, reader.left, reader.arrival

    order: list[int] = []
    while lines:
        name = min(lines, key=lambda name: place(lines[name]))
        order.append(lines[name].popleft())
        claims[name[0]].add(readers[order[-1]], readers[order[-1]].left)
        if not lines[name]:
            del lines[name]
    return order


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
