"""What a pass meets between its large operations: ranks that are not ready together, cold caches, small operations.

A collective that follows the one before at once finds all ranks there, and everything that it needs in a cache. In a
pass it finds neither. Every case here begins with a stretch of matrix products of one token, as a decoding step has
them between two collectives, and what it takes beyond that is what the profile keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from megakv.costmodel.attention_time import DECODING, LayerTimes
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.hardware import HardwareProfile, SumTimes
from megakv.costmodel.measure.kernels import CurveCases, Matrices
from megakv.costmodel.measure.links import OPERATION, sum_name, summing
from megakv.costmodel.measure.stopwatch import Cases, Pool, Times
from megakv.costmodel.measure.trial import TrialLayer
from megakv.costmodel.shape import AttentionShape
from megakv.distributed.comm import Communicator

MEETING = "replicated"
"""The method behind which stretches of both lengths are timed: all ranks meet in it once."""
METHODS = {"pass_kv": "pass_kv", "pass_q": "pass_q", "all_gather": "all_gather", MEETING: MEETING, DECODING: "pass_q"}
"""What `step_overhead_s` of a profile knows, and the methods that it runs."""
SHORT, LONG = 1, 4
"""How often a stretch goes through its matrices."""
SUMMED_BYTES = 1 << 13
"""Of a sum of a decoding step."""
WEIGHT = 4.0
"""These cases' share of their time, over that of others: when ranks meet differs from one time to the next."""
RESULTS = 1 << 15
"""Elements of a result that all ranks are told, as of the logits of a usual vocabulary."""


def behind(stretch: Callable[[], object], times: int, then: Callable[[], object]) -> Callable[[], object]:
    def call() -> None:
        for _ in range(times):
            stretch()
        then()

    return call


class MeetingCases:
    """What ranks do together, each behind a stretch; `sums` are meshes whose tensor-parallel ranks sum."""

    def __init__(
        self,
        comm: Communicator,
        pool: Pool,
        shape: AttentionShape,
        sums: Sequence[Communicator],
        matrices: Matrices,
    ):
        self._matrices = matrices
        ring = comm.mesh.cp_size
        self._comm = comm
        self._pool = pool
        self._sums = sums
        dim, dtype = shape.head_dim, pool.dtype
        self._shape = AttentionShape(shape.heads, shape.heads // shape.group, dim, dim, dtype.itemsize)
        # The smallest pass of every method.
        self._works = {name: Workload((2 * ring,), (0,), ring) for name in METHODS}
        self._works[MEETING] = Workload((1,), (0,), ring)
        self._works[DECODING] = Workload((1,) * ring, (0,) * ring, ring)

    def add(self, cases: Cases) -> None:
        comm, stretch = self._comm, self._matrices.pass_through(self._pool, 1)
        for name, work in self._works.items():
            trial = TrialLayer(comm, self._shape, work, pool=self._pool)
            for often in (SHORT, LONG) if name == MEETING else (SHORT,):
                run = behind(stretch, often, partial(trial.run, METHODS[name]))
                cases.add("behind", name, often, call=run, weight=WEIGHT)
        logits, word = torch.zeros(RESULTS, device=comm.mesh.device), comm.device_tensor([0, 0])

        def share() -> None:
            comm.broadcast(logits, 0, operation=OPERATION)
            comm.broadcast(word, 0, operation=OPERATION)

        cases.add("behind", "share", SHORT, call=behind(stretch, SHORT, share), weight=WEIGHT)
        for each in self._sums:
            small = behind(stretch, SHORT, summing(each, SUMMED_BYTES))
            cases.add("behind", sum_name(each), SHORT, call=small, weight=WEIGHT)

    def fields(self, profile: HardwareProfile, times: Times) -> dict[str, Any]:
        """Fields of `HardwareProfile`, from one that lacks them: step_overhead_s, lag, share_s."""
        computed = self._behind(times)
        overheads = {}
        for name, work in self._works.items():
            predicted = LayerTimes(profile, self._shape, work).predict(METHODS[name]).seconds
            rest = times.together(("behind", name, SHORT)) - computed - predicted
            overheads[name] = max(0.0, rest) / work.size
        shared = times.together(("behind", "share", SHORT)) - computed
        return {
            "step_overhead_s": overheads,
            "lag": max(0.0, computed / SHORT / (self._matrices.elements * profile.matmul.at(1)) - 1),
            "share_s": max(0.0, shared) / 2,
        }

    def sum_times(self, times: Times, curves: Sequence[CurveCases]) -> tuple[SumTimes, ...]:
        computed = self._behind(times)
        found = []
        for comm, curve in zip(self._sums, curves, strict=True):
            seconds = curve.curve(times)
            late = times.together(("behind", sum_name(comm), SHORT)) - computed
            late -= seconds.at(SUMMED_BYTES)
            mesh = comm.mesh
            found.append(
                SumTimes(ranks=mesh.tp_size, shared_memory=mesh.shared_memory, seconds=seconds, wait_s=max(0.0, late))
            )
        return tuple(found)

    @staticmethod
    def _behind(times: Times) -> float:
        """Seconds of a short stretch that all ranks end together."""
        short, long = (times.together(("behind", MEETING, often)) for often in (SHORT, LONG))
        return SHORT * max(0.0, long - short) / (LONG - SHORT)
