"""The loop in which all ranks serve: rank 0 takes requests, plans passes and samples; the others follow its plans."""

from __future__ import annotations

from megakv.engine import MegaKVEngine
from megakv.errors import MegaKVError
from megakv.serving.request import Request
from megakv.serving.settings import ServingSettings
from megakv.serving.stats import Document, ServingStats


class RefusedError(MegaKVError):
    """No request is taken at the moment: too many wait, or the server is draining."""


class ServingLoop:
    """Serves the requests of many with one engine.

    Every rank makes one and calls `run`, with the same settings. All other methods are for rank 0, and safe to call
    from any thread, before `run` and while it goes on.

    Raises
    ------
    ValueError
        If the engine has settings that cannot be served, by name.
    """

    def __init__(self, engine: MegaKVEngine, settings: ServingSettings):
        self._engine, self._settings = engine, settings

    def run(self) -> None:
        """Serve until drained. A MegaKVError if a rank is lost, after every request was told so."""
        raise NotImplementedError

    def submit(self, request: Request) -> None:
        """Take a request; its sink is told everything from here on, by the thread of `run`.

        Raises
        ------
        ValueError
            If the prompt is empty or too long, by the setting that limits it, or the id is in use.
        RefusedError
            If too many requests wait, or the server is draining or has ended.
        """
        raise NotImplementedError

    def cancel(self, request_id: str) -> None:
        """End a request after the pass under way; what was computed of it is kept. One that has ended is no error."""
        raise NotImplementedError

    def drain(self) -> None:
        """Take no more requests, and end `run` when those that were taken are answered."""
        raise NotImplementedError

    def stats(self) -> ServingStats:
        """A snapshot of load, memory and times."""
        raise NotImplementedError

    def documents(self) -> list[Document]:
        """Prefixes that are kept, the last used first, a hundred at most."""
        raise NotImplementedError
