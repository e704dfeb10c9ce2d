"""What goes wrong on real machines, done to a simulated one: slow ranks, slow links, and noise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from megakv.costmodel.simulation_program import Program, Task


@dataclass(frozen=True)
class Disturbances:
    """Factors on the times of a program's tasks.

    Raises ValueError: if a factor is not above 0, sigma is not between 0 and 5, or a link has one end only.
    """

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
        """Refuse ranks that a world of this size has not.

        Raises ValueError: naming the rank and what there is.
        """
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
            return self._between(task.rank, task.peer)
        return max((factor for link, factor in self.slow_links.items() if set(link) <= set(task.group)), default=1.0)

    def _between(self, first: int, second: int) -> float:
        return self.slow_links.get((first, second), self.slow_links.get((second, first), 1.0))
