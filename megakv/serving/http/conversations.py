"""Responses that later ones go on from: conversations by id, in memory, the last used within a bound."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass
from functools import cached_property
from sys import getsizeof
from typing import Any

MOST_RESPONSES = 4096
MOST_BYTES = 256 << 20
"""Memory of all conversations; what several of them share counts once."""


@dataclass(frozen=True)
class Turn:
    """One response: what it added to the conversation before it."""

    owner: str
    previous: Turn | None
    added: tuple[dict[str, Any], ...]
    response: dict[str, Any]

    @property
    def line(self) -> list[Turn]:
        """The turns from the first to this one."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.previous
        return turns[::-1]

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The whole conversation, instructions excepted."""
        return [message for turn in self.line for message in turn.added]

    @cached_property
    def bytes(self) -> int:
        """Memory of what it added and what its response repeats of the body, with room for its frame."""
        added = sum(getsizeof(str(value)) for message in self.added for value in message.values())
        return 2000 + added + getsizeof(str(self.response))

    def forget_response(self) -> None:
        """Of one that is only gone on from, what it added alone is of use."""
        self.response.clear()
        self.__dict__.pop("bytes", None)


class Conversations:
    """Turns by their responses' ids. Any of them can be gone on from, as often as asked: a fork.

    Where they are beyond a bound, the owner who has most gives up his own: nobody's go below an equal part of it.
    """

    def __init__(self, most: int = MOST_RESPONSES, most_bytes: int = MOST_BYTES):
        self._most, self._most_bytes = most, most_bytes
        self._turns: dict[str, OrderedDict[str, Turn]] = {}
        self._bytes: dict[str, int] = {}
        self._holders: Counter[int] = Counter()

    def find(self, name: str, owner: str) -> Turn | None:
        """A turn of this owner."""
        turns = self._turns.get(owner, OrderedDict())
        if name in turns:
            turns.move_to_end(name)
        return turns.get(name)

    def keep(self, name: str, turn: Turn) -> None:
        """Add one; those not used for longest go, in so far as no other goes on from them."""
        self._turns.setdefault(turn.owner, OrderedDict())[name] = turn
        self._hold(turn)
        while self.count > 1:
            if self.count > self._most:
                heaviest = max(self._turns, key=lambda owner: len(self._turns[owner]))
            elif self.bytes > self._most_bytes:
                heaviest = max(self._bytes, key=self._bytes.__getitem__)
            else:
                return
            self._let_go(heaviest, next(iter(self._turns[heaviest])))

    def drop(self, name: str, owner: str) -> bool:
        """Forget one; whether there was such."""
        if self.find(name, owner) is None:
            return False
        self._let_go(owner, name)
        return True

    @property
    def count(self) -> int:
        """Turns that are kept."""
        return sum(map(len, self._turns.values()))

    @property
    def bytes(self) -> int:
        """Memory that they hold."""
        return sum(self._bytes.values())

    def _hold(self, turn: Turn | None) -> None:
        """One holder more of a turn, which holds the one before it: its name, or a turn that goes on from it."""
        while turn is not None:
            self._holders[id(turn)] += 1
            if self._holders[id(turn)] > 1:
                return
            self._bytes[turn.owner] = self._bytes.get(turn.owner, 0) + turn.bytes
            turn = turn.previous

    def _let_go(self, owner: str, name: str) -> None:
        """Forget a name, with what nobody else holds: without a look at all others, of which there may be thousands."""
        named = self._turns[owner].pop(name)
        self._bytes[owner] -= named.bytes
        named.forget_response()
        self._bytes[owner] += named.bytes
        turn: Turn | None = named
        while turn is not None:
            self._holders[id(turn)] -= 1
            if self._holders[id(turn)]:
                break
            del self._holders[id(turn)]
            self._bytes[owner] -= turn.bytes
            turn = turn.previous
        if not self._turns[owner]:
            del self._turns[owner], self._bytes[owner]
