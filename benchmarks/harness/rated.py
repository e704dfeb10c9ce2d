"""A method at one rate of the links between hosts."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from .sampling import Bytes, Method
from .world import World


class Rated(Method):
    """Sets the rate before every run of a method.

    Parameters
    ----------
    method : Method
    rate : str
        Of every host's link in each direction.
    world : World
    """

    def __init__(self, method: Method, rate: str, world: World):
        super().__init__(f"{method.name}, {rate}")
        self.rate = rate
        self.method = method
        self._world = world

    def prepare(self) -> None:
        from tests.hosts.control import ask_rate

        self.method.prepare()
        # All wait at a barrier next: nothing is under way but what ended the last run.
        if self._world.rank == 0:
            ask_rate(self.rate)

    def run(self) -> Any:
        return self.method.run()

    def counting(self) -> AbstractContextManager[Bytes]:
        return self.method.counting()
