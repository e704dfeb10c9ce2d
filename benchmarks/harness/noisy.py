"""A method beside a competing flow."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from .noise import ELSEWHERE, LINK, QUIET, pair_names
from .sampling import Bytes, Method
from .world import World

SETTLE_S = 0.15
"""For a flow to come to its rate, or for what is queued of it to pass."""


class Noisy(Method):
    """Switches a flow on or off before every run of a method."""

    def __init__(self, method: Method, noise: str, switch: Path, world: World):
        super().__init__(method.name if noise == QUIET else f"{method.name}, {noise}")
        self.noise = noise
        self.method = method
        self._switch = switch
        self._world = world
        self._runs = 0

    def prepare(self) -> None:
        self.method.prepare()
        pairs = {QUIET: [QUIET], ELSEWHERE: [ELSEWHERE], LINK: pair_names(self._world.size)}[self.noise]
        if self._world.rank == 0:
            self._switch.write_text(pairs[self._runs % len(pairs)])
        self._runs += 1
        time.sleep(SETTLE_S)

    def run(self) -> Any:
        return self.method.run()

    def duration(self, elapsed: float) -> float:
        return self.method.duration(elapsed)

    def counting(self) -> AbstractContextManager[Bytes]:
        return self.method.counting()
