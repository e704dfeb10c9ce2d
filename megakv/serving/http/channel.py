"""Events on their way from the thread that computes to the one that speaks with clients."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from threading import Lock

from megakv.serving.request import Event, Finished, Progress

MOST_EVENTS = 4096
"""Of one call that wait for a client that does not read; then it is taken to be gone."""


class Bell:
    """Wakes the event loop that makes it: once, a system call, for all that is to be set until it comes to look.

    A token of every stream comes at once, and the thread that computes is the one that rings.
    """

    def __init__(self) -> None:
        self._lock, self._loop = Lock(), asyncio.get_running_loop()
        self._waiting: list[asyncio.Event] = []

    def ring(self, event: asyncio.Event) -> None:
        """Have an event set by the loop's thread."""
        with self._lock:
            self._waiting.append(event)
            first = len(self._waiting) == 1
        if first:
            try:
                self._loop.call_soon_threadsafe(self._look)
            except RuntimeError:
                # After the server's end nobody listens.
                with self._lock:
                    self._waiting.clear()

    def _look(self) -> None:
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for event in waiting:
            event.set()


class Channel:
    """Events of the answers to one call, each with the number of its answer.

    It belongs to the bell's event loop; `put` is for any thread, and returns at once.
    """

    def __init__(self, bell: Bell, most: int = MOST_EVENTS) -> None:
        self._most = most
        self._events: deque[tuple[int, Event]] = deque()
        self._lock, self._bell = Lock(), bell
        self._ready = asyncio.Event()
        self._closed = False

    def put(self, index: int, event: Event) -> None:
        """Add an event. Of progress, the last alone is of interest; beyond the bound, all are given up."""
        with self._lock:
            if self._closed:
                return
            if isinstance(event, Progress) and self._events and isinstance(self._events[-1][1], Progress):
                self._events.pop()
            if len(self._events) >= self._most:
                self._events.clear()
                event = Finished("error", "the client does not read what was asked for")
                self._closed = True
            self._events.append((index, event))
            first = len(self._events) == 1
        if first:
            self._bell.ring(self._ready)

    async def take(self, seconds: float) -> list[tuple[int, Event]]:
        """All events that have come, once there are any; none where none came for so long."""
        with suppress(TimeoutError):
            # Unlike `wait_for` it makes no task, for every token of every stream.
            async with asyncio.timeout(seconds):
                await self._ready.wait()
        with self._lock:
            self._ready.clear()
            events = list(self._events)
            self._events.clear()
        return events

    def close(self) -> None:
        """Take no more."""
        with self._lock:
            self._closed = True
            self._events.clear()
