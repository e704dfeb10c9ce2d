"""A method at one rate of the links between hosts."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from .sampling import Bytes, Method
from .world import World


def set_rate(rate: str, world: World) -> None:
    """Give every host's link this rate. All ranks must call it, with nothing under way."""
    from tests.hosts.control import ask_rate

    if world.rank == 0:
        ask_rate(rate)
    world.barrier()


class Rated(Method):
    """Sets the rate before every run of a method."""

    def __init__(self, method: Method, rate: str, world: World):
        super().__init__(f"{method.name}, {rate}")
        self.rate = rate
        self.method = method
        self._world = world

    def prepare(self) -> None:
        self.method.prepare()
        # Nothing is under way but what ended the last run.
        set_rate(self.rate, self._world)

    def run(self) -> Any:
        return self.method.run()

    def counting(self) -> AbstractContextManager[Bytes]:
        return self.method.counting()
