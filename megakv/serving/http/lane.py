"""Places for work that users take by turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Lane:
    """So many pieces of work at a time. Users wait in a ring: each has one piece done when it is its turn."""

    def __init__(self, places: int):
        self._free = places
        self._ring: dict[str, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def place(self, user: str) -> AsyncIterator[None]:
        """Wait for a place, and keep it until the end; whoever is cancelled leaves the line."""
        if self._free:
            self._free -= 1
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._ring.setdefault(user, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():
                    self._pass_on()
                raise
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        """Give a place to the next one that still waits, or keep it free."""
        while self._ring:
            user = next(iter(self._ring))
            line = self._ring.pop(user)
            turn = line.popleft()
            while line and turn.cancelled():
                turn = line.popleft()
            if line:
                self._ring[user] = line
            if not turn.cancelled():
                turn.set_result(None)
                return
        self._free += 1
