"""What the simulator plays: tasks of ranks, of the links between them, and of those to host memory."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Task:
    """One thing that happens."""

    name: str  # As the timeline of a real run calls it: ``attention``, ``dense``, or the operation of a transfer.
    kind: Literal["compute", "communication"]  # ``compute`` or ``communication``.
    rank: int  # Who computes, or sends.
    seconds: float  # With nothing else running.
    after: tuple[int, ...]  # Indices of the tasks that must have ended.
    resource: Hashable  # What serves one task at a time, in the order in which they become ready.
    peer: int | None = None  # Who receives.
    nbytes: int = 0  # What goes over the wire.
    layer: int | None = None  # Decoder layer.
    group: tuple[int, ...] = ()  # The ranks of a collective.

    @property
    def ends(self) -> tuple[int, ...]:
        """The ranks that it concerns."""
        return (self.rank,) if self.peer is None or self.peer == self.rank else (self.rank, self.peer)


@dataclass(slots=True)
class Program:
    """Tasks of all ranks."""

    ranks: int  # Of the whole world.
    tasks: list[Task] = field(default_factory=list)
    # More that must have ended: a task, and one that was added after it.
    waits: list[tuple[int, int]] = field(default_factory=list)

    def compute(
        self, name: str, rank: int, seconds: float, after: Sequence[int] = (), *, layer: int | None = None
    ) -> int:
        """Add a computation; returns its index."""
        self.tasks.append(Task(name, "compute", rank, seconds, tuple(after), ("processor", rank), layer=layer))
        return len(self.tasks) - 1

    def send(
        self,
        name: str,
        rank: int,
        peer: int,
        seconds: float,
        after: Sequence[int] = (),
        *,
        nbytes: int = 0,
        layer: int | None = None,
    ) -> int:
        """Add a message over the link from `rank` to `peer`; returns its index."""
        link = ("link", rank, peer)
        self.tasks.append(Task(name, "communication", rank, seconds, tuple(after), link, peer, nbytes, layer))
        return len(self.tasks) - 1

    def load(
        self, name: str, rank: int, seconds: float, after: Sequence[int], nbytes: int, *, layer: int | None = None
    ) -> int:
        """Add a transfer from host memory; all of a rank's share one link. Returns its index."""
        link = ("host link", rank)
        self.tasks.append(Task(name, "communication", rank, seconds, tuple(after), link, nbytes=nbytes, layer=layer))
        return len(self.tasks) - 1

    def attend_on_host(self, rank: int, seconds: float, after: Sequence[int], *, layer: int | None = None) -> int:
        """Add what a rank's host computes meanwhile; returns its index."""
        self.tasks.append(
            Task("host attention", "communication", rank, seconds, tuple(after), ("host", rank), layer=layer)
        )
        return len(self.tasks) - 1

    def collective(
        self,
        name: str,
        group: Sequence[int],
        seconds: float,
        after: Sequence[int],
        *,
        nbytes: Sequence[int] | int = 0,
        layer: int | None = None,
    ) -> list[int]:
        """Add what a group does together, which begins when all of `after` have ended.

        group: ranks.
        nbytes: what each of them sends.
        Returns the index of every rank's part.
        """
        sent = [nbytes] * len(group) if isinstance(nbytes, int) else nbytes
        first = len(self.tasks)
        for rank, count in zip(group, sent, strict=True):
            resource = ("collective", tuple(group), rank)
            self.tasks.append(
                Task(
                    name,
                    "communication",
                    rank,
                    seconds,
                    tuple(after),
                    resource,
                    nbytes=count,
                    layer=layer,
                    group=tuple(group),
                )
            )
        return list(range(first, len(self.tasks)))
