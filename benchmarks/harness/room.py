"""Memory for one method's cache at a time."""

from __future__ import annotations

from typing import Protocol


class Guest(Protocol):
    """Something that needs much memory, and can do without it between its runs."""

    def build(self) -> None:
        """Take the memory."""

    def leave(self) -> None:
        """Free it."""


class Room:
    """Who has its cache in memory: the next guest's takes its place."""

    def __init__(self) -> None:
        self._guest: Guest | None = None

    def take(self, guest: Guest) -> None:
        """Let a guest have its cache here."""
        if self._guest is not guest:
            self.clear()
            self._guest = guest
            guest.build()

    def clear(self) -> None:
        """Let nobody have one: what is measured next needs the memory."""
        if self._guest is not None:
            self._guest.leave()
            self._guest = None
