"""Bodies of several sequences in one memory, for kernels that take the heads of all of them in one call."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from megakv.attention.varlen import KeyRuns
from megakv.cache.ragged_body import Body, BodyIndex, RaggedBody


class JoinedBodies:
    """The keys of all, body after body, and their values: ``[n, D]`` and ``[n, Dv]``."""

    def __init__(self, bodies: Sequence[RaggedBody]):
        self.k_nD, self.v_nD = torch.cat([b.k_nD for b in bodies]), torch.cat([b.v_nD for b in bodies])
        self._counts = [body.counts for body in bodies]
        self._bounds = np.cumsum([0, *(body.index.tokens for body in bodies)]).tolist()
        self._runs: dict[tuple[int, int], KeyRuns] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def rows(self, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the bodies from a first one to before a last one."""
        own = slice(self._bounds[first], self._bounds[last])
        return self.k_nD[own], self.v_nD[own]

    def runs(self, first: int, last: int) -> KeyRuns:
        """Their heads, body after body."""
        if (first, last) not in self._runs:
            self._runs[first, last] = KeyRuns(np.concatenate(self._counts[first:last]), self.k_nD.device)
        return self._runs[first, last]


class JoinedBody(RaggedBody):
    """One of them."""

    def __init__(self, index: BodyIndex, joined: JoinedBodies, place: int):
        super().__init__(index, *joined.rows(place, place + 1))
        self.joined, self.place = joined, place


def join(bodies: Sequence[Body]) -> list[RaggedBody] | None:
    """The same bodies in one memory, in this order; None where that gains nothing, or they are shared or elsewhere.

    On processors a kernel takes them wherever they lie.
    """
    here = [body for body in bodies if isinstance(body, RaggedBody) and body.k_nD.device.type != "cpu"]
    if len(here) < max(2, len(bodies)) or len(set(map(id, here))) < len(here):
        return None
    last = here[-1]
    if len(stretches(here)) == 1 and isinstance(last, JoinedBody) and len(last.joined) == len(here):
        return None
    joined = JoinedBodies(here)
    return [JoinedBody(body.index, joined, place) for place, body in enumerate(here)]


def stretches(bodies: Sequence[RaggedBody]) -> list[tuple[int, int]]:
    """First and last, exclusively, of those that lie one behind the other in one memory."""
    found: list[tuple[int, int]] = []
    for at, body in enumerate(bodies):
        if at and _follows(bodies[at - 1], body):
            found[-1] = found[-1][0], at + 1
        else:
            found.append((at, at + 1))
    return found


def _follows(first: RaggedBody, second: RaggedBody) -> bool:
    if not (isinstance(first, JoinedBody) and isinstance(second, JoinedBody)):
        return False
    return first.joined is second.joined and first.place + 1 == second.place


def rows_of(bodies: Sequence[RaggedBody]) -> tuple[Tensor, Tensor, KeyRuns]:
    """Keys, values and the heads of a stretch."""
    first, last = bodies[0], bodies[-1]
    if len(bodies) == 1:
        return first.k_nD, first.v_nD, first.key_runs
    assert isinstance(first, JoinedBody) and isinstance(last, JoinedBody)
    span = first.place, last.place + 1
    return *first.joined.rows(*span), first.joined.runs(*span)
