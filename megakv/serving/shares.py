"""What keys, and the users of each, were served lately: whoever has least of it is next."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Protocol

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
