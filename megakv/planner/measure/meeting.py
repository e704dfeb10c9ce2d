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
from megakv.costmodel.curves import Curve
from megakv.costmodel.hardware import HardwareProfile, SumTimes
from megakv.costmodel.shape import AttentionShape
from megakv.costmodel.stopwatch import Case, Cases, Pool
from megakv.distributed.comm import Communicator
from megakv.planner.measure.kernels import Matrices
from megakv.planner.measure.links import OPERATION, summing
from megakv.planner.measure.trial import TrialLayer

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


class Meeting:
    """What ranks do together, each behind a stretch.

    sums: meshes whose tensor-parallel ranks sum, and the curves of their sums.
    """

    def __init__(
        self,
        cases: Cases,
        comm: Communicator,
        pool: Pool,
        shape: AttentionShape,
        matrices: Matrices,
        sums: Sequence[tuple[Communicator, Callable[[], Curve]]],
    ):
        ring, dim = comm.mesh.cp_size, shape.head_dim
        self._matrices = matrices
        self._shape = AttentionShape(shape.heads, shape.heads // shape.group, dim, dim, pool.dtype.itemsize)
        # The smallest pass of every method.
        self._works = {name: Workload((2 * ring,), (0,), ring) for name in METHODS}
        self._works[MEETING] = Workload((1,), (0,), ring)
        self._works[DECODING] = Workload((1,) * ring, (0,) * ring, ring)
        stretch = matrices.pass_through(pool, 1)

        def behind(then: Callable[[], object], times: int = SHORT) -> Case:
            def call() -> None:
                for _ in range(times):
                    stretch()
                then()

            return cases.add(call, weight=WEIGHT)

        logits, word = (torch.zeros(count, device=comm.mesh.device) for count in (RESULTS, 4))

        def share() -> None:
            comm.broadcast(logits, 0, operation=OPERATION)
            comm.broadcast(word, 0, operation=OPERATION)

        runs = {
            name: partial(TrialLayer(comm, self._shape, work, pool=pool).run, METHODS[name])
            for name, work in self._works.items()
        }
        self.methods = {name: behind(run) for name, run in runs.items()}
        self.long, self.shared = behind(runs[MEETING], LONG), behind(share)
        self.sums = [(each, curve, behind(summing(each, SUMMED_BYTES))) for each, curve in sums]

    def fields(self, profile: HardwareProfile) -> dict[str, Any]:
        """Fields of `HardwareProfile`, from one that lacks them: step_overhead_s, lag, share_s, sums."""
        # Of a short stretch that all ranks end together.
        computed = SHORT * max(0.0, self.long.together - self.methods[MEETING].together) / (LONG - SHORT)
        overheads = {}
        for name, work in self._works.items():
            predicted = LayerTimes(profile, self._shape, work).predict(METHODS[name]).seconds
            overheads[name] = max(0.0, self.methods[name].together - computed - predicted) / work.size
        return {
            "step_overhead_s": overheads,
            "lag": max(0.0, computed / SHORT / (self._matrices.elements * profile.matmul.at(1)) - 1),
            "share_s": max(0.0, self.shared.together - computed) / 2,
            "sums": tuple(
                SumTimes(
                    ranks=comm.mesh.tp_size,
                    shared_memory=comm.mesh.shared_memory,
                    seconds=curve(),
                    wait_s=max(0.0, case.together - computed - curve().at(SUMMED_BYTES)),
                )
                for comm, curve, case in self.sums
            ),
        }
