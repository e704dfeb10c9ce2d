"""Responses that later ones go on from: conversations by id, in memory, the last used within a bound."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import cached_property
from typing import Any

MOST_RESPONSES = 4096
MOST_LETTERS = 256 << 20
"""Of all conversations; what several of them share counts once."""


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
    def letters(self) -> int:
        """What it added and what its response repeats of the body, with room for its frame."""
        added = sum(len(str(value)) for message in self.added for value in message.values())
        return 2000 + added + len(str(self.response))


class Conversations:
    """Turns by their responses' ids. Any of them can be gone on from, as often as asked: a fork."""

    def __init__(self, most: int = MOST_RESPONSES, most_letters: int = MOST_LETTERS):
        self._most, self._most_letters = most, most_letters
        self._turns: OrderedDict[str, Turn] = OrderedDict()

    def find(self, name: str, owner: str) -> Turn | None:
        """A turn of this owner."""
        turn = self._turns.get(name)
        if turn is None or turn.owner != owner:
            return None
        self._turns.move_to_end(name)
        return turn

    def keep(self, name: str, turn: Turn) -> None:
        """Add one; those not used for longest go, in so far as no other goes on from them."""
        self._turns[name] = turn
        while len(self._turns) > 1 and (len(self._turns) > self._most or self._letters() > self._most_letters):
            self._turns.popitem(last=False)

    def drop(self, name: str, owner: str) -> bool:
        """Forget one; whether there was such."""
        if self.find(name, owner) is None:
            return False
        del self._turns[name]
        return True

    def _letters(self) -> int:
        held: dict[int, int] = {}
        for turn in self._turns.values():
            each: Turn | None = turn
            while each is not None and id(each) not in held:
                held[id(each)] = each.letters
                each = each.previous
        return sum(held.values())
