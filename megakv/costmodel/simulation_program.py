"""What the simulator plays: tasks of ranks, of the links between them, and of those to host memory; and what goes wrong
with them on real machines: slow ranks, slow links, and noise.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np


@dataclass(frozen=True, slots=True)
class Task:
    name: str  # As the timeline of a real run calls it: ``attention``, ``dense``, or the operation of a transfer.
    kind: Literal["compute", "communication"]
    rank: int  # Who computes, or sends.
    seconds: float  # With nothing else running.
    after: tuple[int, ...]  # Indices of the tasks that must have ended.
    resource: Hashable  # What serves one task at a time, in the order in which they become ready.
    peer: int | None = None  # Who receives.
    nbytes: int = 0  # What goes over the wire.
    layer: int | None = None
    group: tuple[int, ...] = ()  # The ranks of a collective.

    @property
    def ends(self) -> tuple[int, ...]:
        return (self.rank,) if self.peer is None or self.peer == self.rank else (self.rank, self.peer)


@dataclass(slots=True)
class Program:
    """Tasks of all ranks."""

    ranks: int  # Of the whole world.
    tasks: list[Task] = field(default_factory=list)
    # More that must have ended: a task, and one that was added after it.
    waits: list[tuple[int, int]] = field(default_factory=list)

    def compute(self, name: str, rank: int, seconds: float, after: Sequence[int] = (), **more: Any) -> int:
        """Add a computation; returns its index. `more`: further fields of the task, as ``layer``."""
        return self._add(Task(name, "compute", rank, seconds, tuple(after), ("processor", rank), **more))

    def send(self, name: str, rank: int, peer: int, seconds: float, after: Sequence[int] = (), **more: Any) -> int:
        link = ("link", rank, peer)
        return self._add(Task(name, "communication", rank, seconds, tuple(after), link, peer, **more))

    def load(self, name: str, rank: int, seconds: float, after: Sequence[int], nbytes: int, **more: Any) -> int:
        """Add a transfer from host memory; all of a rank's share one link."""
        link = ("host link", rank)
        return self._add(Task(name, "communication", rank, seconds, tuple(after), link, nbytes=nbytes, **more))

    def attend_on_host(self, rank: int, seconds: float, after: Sequence[int], **more: Any) -> int:
        return self._add(Task("host attention", "communication", rank, seconds, tuple(after), ("host", rank), **more))

    def collective(
        self,
        name: str,
        group: Sequence[int],
        seconds: float,
        after: Sequence[int],
        *,
        nbytes: Sequence[int],
        **more: Any,
    ) -> list[int]:
        """Add what ranks do together once all of `after` have ended; returns the index of every rank's part."""
        common = {"seconds": seconds, "after": tuple(after), "group": tuple(group), **more}
        return [
            self._add(
                Task(name, "communication", rank, resource=("collective", tuple(group), rank), nbytes=count, **common)
            )
            for rank, count in zip(group, nbytes, strict=True)
        ]

    def _add(self, task: Task) -> int:
        self.tasks.append(task)
        return len(self.tasks) - 1


@dataclass(frozen=True)
class Disturbances:
    """Factors on the times of a program's tasks; a ValueError where one is impossible."""

    slow_ranks: Mapping[int, float] = field(default_factory=dict)  # Computation of a rank takes so many times longer.
    # Messages between two ranks, both ways, take so many times longer; a collective as long as its slowest link.
    slow_links: Mapping[tuple[int, int], float] = field(default_factory=dict)
    noise: float = 0.0  # Sigma of the log-normal factor, of median 1, that every task gets.
    seed: int = 0  # Of that noise.

    def __post_init__(self) -> None:
        for name, factor in [*self.slow_ranks.items(), *self.slow_links.items()]:
            if not 0 < factor < math.inf:
                raise ValueError(f"{name}: factor {factor}: allowed: a number above 0, such as 2 for twice the time")
        for first, second in self.slow_links:
            if first == second:
                raise ValueError(f"link {first}-{second}: allowed: two different ranks")
        if not 0 <= self.noise <= 5:
            raise ValueError(f"noise {self.noise}: allowed: a sigma from 0 to 5")

    def check(self, ranks: int) -> None:
        named = {*self.slow_ranks, *(rank for link in self.slow_links for rank in link)}
        for rank in sorted(named):
            if not 0 <= rank < ranks:
                raise ValueError(f"rank {rank}: allowed: 0 to {ranks - 1}")

    def of(self, program: Program) -> Program:
        """The program as it goes on the disturbed machine."""
        self.check(program.ranks)
        tasks = program.tasks
        factors = [self._factor(task) for task in tasks]
        if self.noise:
            noise = np.exp(np.random.default_rng(self.seed).normal(0.0, self.noise, len(tasks)))
            factors = [factor * float(each) for factor, each in zip(factors, noise, strict=True)]
        changed = [
            task if factor == 1.0 else replace(task, seconds=task.seconds * factor)
            for task, factor in zip(tasks, factors, strict=True)
        ]
        return Program(program.ranks, changed, program.waits)

    def _factor(self, task: Task) -> float:
        if task.kind == "compute":
            return self.slow_ranks.get(task.rank, 1.0)
        if task.peer is not None:
            there, back = (task.rank, task.peer), (task.peer, task.rank)
            return self.slow_links.get(there, self.slow_links.get(back, 1.0))
        return max((factor for link, factor in self.slow_links.items() if set(link) <= set(task.group)), default=1.0)
