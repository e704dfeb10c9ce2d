"""What a pass meets between its large operations: ranks that are not ready together, cold caches, small operations.

A collective that follows the one before at once finds all ranks there, and everything that it needs in a cache. In a
pass it finds neither. Every cell here begins with a stretch of matrix products of one token, as a decoding step has
them between two collectives, and what it takes beyond that is what the profile keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from megakv.comm import Communicator
from megakv.costmodel.attention_time import LayerTimes
from megakv.costmodel.context_parallel import Workload
from megakv.costmodel.dense import TokenTimes
from megakv.costmodel.hardware import HardwareProfile, SumTimes
from megakv.costmodel.kernel_times import WEIGHT_WIDTH, CurveCells, KernelSizes
from megakv.costmodel.link_times import OPERATION, sum_name, summing
from megakv.costmodel.shape import AttentionShape, ModelShape
from megakv.costmodel.stopwatch import Battery, Pool, Times
from megakv.costmodel.trial import TrialLayer

METHODS = ("pass_kv", "pass_q", "all_gather", "replicated")
MEETING = "replicated"
"""The method behind which stretches of both lengths are timed: all ranks meet in it once."""
SHORT, LONG = 2, 6
"""Matrix products of a stretch."""
RESULTS = 1 << 15
"""Elements of a result that all ranks are told, as of the logits of a usual vocabulary."""
FEW, MANY = 1, 5
"""Layers of the small models."""
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}


class Stretch:
    """Matrix products of one token with weights that no cache holds.

    Parameters
    ----------
    pool : Pool
    """

    def __init__(self, pool: Pool):
        self._pool = pool
        self._x_TH = pool.take(1, WEIGHT_WIDTH).clone()

    def __call__(self, products: int) -> None:
        for _ in range(products):
            torch.nn.functional.linear(self._x_TH, self._pool.take(WEIGHT_WIDTH, WEIGHT_WIDTH))

    def before(self, then: Callable[[], object], products: int = SHORT) -> Callable[[], object]:
        """A call that begins with so many products."""

        def call() -> None:
            self(products)
            then()

        return call


def product_s(profile: HardwareProfile) -> float:
    """Seconds of one product of a stretch."""
    return WEIGHT_WIDTH**2 * profile.matmul.at(1)


class MeetingCells:
    """What ranks do together, each behind a stretch.

    Parameters
    ----------
    comm : Communicator
        Its context-parallel degree must be 2 or more.
    pool : Pool
    size : KernelSizes
        Heads of the layer that is passed by every method.
    sums : sequence of Communicator
        Meshes whose tensor-parallel ranks sum.
    """

    def __init__(self, comm: Communicator, pool: Pool, size: KernelSizes, sums: Sequence[Communicator]):
        ring = comm.mesh.cp_size
        self._comm = comm
        self._pool = pool
        self._sums = sums
        self._shape = AttentionShape(
            size.heads, size.heads // size.group, size.head_dim, size.head_dim, pool.dtype.itemsize
        )
        # The smallest pass of every method.
        self._works = {name: Workload((1 if name == MEETING else 2 * ring,), (0,), ring) for name in METHODS}

    def add(self, battery: Battery) -> None:
        """Put the cells into a battery."""
        comm, stretch = self._comm, Stretch(self._pool)
        for method, work in self._works.items():
            trial = TrialLayer(comm, self._shape, work, pool=self._pool)
            for products in (SHORT, LONG) if method == MEETING else (SHORT,):
                run = stretch.before(lambda t=trial, m=method: t.run(m), products)  # type: ignore[misc]
                battery.add("behind", method, products, call=run)
        logits, word = torch.zeros(RESULTS, device=comm.mesh.device), comm.device_tensor([0, 0])

        def share() -> None:
            comm.broadcast(logits, 0, operation=OPERATION)
            comm.broadcast(word, 0, operation=OPERATION)

        battery.add("behind", "share", SHORT, call=stretch.before(share))
        for each in self._sums:
            small = summing(each, WEIGHT_WIDTH * torch.float32.itemsize)
            battery.add("behind", sum_name(each), SHORT, call=stretch.before(small))

    def fields(self, profile: HardwareProfile, times: Times) -> dict[str, Any]:
        """Fields of `HardwareProfile`, from one that lacks them: step_overhead_s, lag, share_s."""
        behind = self._behind(times)
        overheads = {}
        for method, work in self._works.items():
            predicted = LayerTimes(profile, self._shape, work).predict(method).seconds
            rest = times.together(("behind", method, SHORT)) - behind - predicted
            overheads[method] = max(0.0, rest) / work.size
        shared = times.together(("behind", "share", SHORT)) - behind
        return {
            "step_overhead_s": overheads,
            "lag": max(0.0, behind / SHORT / product_s(profile) - 1),
            "share_s": max(0.0, shared) / 2,
        }

    def sum_times(self, times: Times, curves: Sequence[CurveCells]) -> tuple[SumTimes, ...]:
        """``sums`` of `HardwareProfile`."""
        behind = self._behind(times)
        found = []
        for comm, cells in zip(self._sums, curves, strict=True):
            seconds = cells.curve(times)
            late = times.together(("behind", sum_name(comm), SHORT)) - behind
            late -= seconds.at(WEIGHT_WIDTH * torch.float32.itemsize)
            mesh = comm.mesh
            found.append(
                SumTimes(ranks=mesh.tp_size, shared_memory=mesh.shared_memory, seconds=seconds, wait_s=max(0.0, late))
            )
        return tuple(found)

    @staticmethod
    def _behind(times: Times) -> float:
        """Seconds of a short stretch that all ranks end together."""
        short, long = (times.together(("behind", MEETING, products)) for products in (SHORT, LONG))
        return SHORT * max(0.0, long - short) / (LONG - SHORT)


class SmallModelCells:
    """Passes of one token through models so small that calling their operations is all that takes time.

    Parameters
    ----------
    pool : Pool
        On CPU: elsewhere operations are called while others compute.
    """

    def __init__(self, pool: Pool):
        self._pool = pool
        self._configs = {layers: LlamaConfig(**SMALL, num_hidden_layers=layers) for layers in (FEW, MANY)}

    def add(self, battery: Battery) -> None:
        """Put the cells into a battery."""
        stretch = Stretch(self._pool)
        for layers, config in self._configs.items():
            model = AutoModelForCausalLM.from_config(config, dtype=self._pool.dtype, attn_implementation="sdpa").eval()
            run = stretch.before(lambda m=model: _passed(m))  # type: ignore[misc]
            battery.add("small model", layers, call=run)

    def fields(self, profile: HardwareProfile, times: Times) -> dict[str, float]:
        """Fields of `HardwareProfile`, from one that lacks them: issue_s, pass_s."""
        few, many = (times["small model", layers] for layers in (FEW, MANY))
        whole = max(0.0, many - few) / (MANY - FEW)
        shape = ModelShape.from_config(self._configs[FEW], dtype=self._pool.dtype)
        tokens = TokenTimes(profile, shape)
        attention = LayerTimes(profile, shape.attention(), Workload((1,), (0,), 1)).predict("single").seconds
        rest = few - FEW * whole - SHORT * product_s(profile) - tokens.head(1)
        return {"issue_s": max(0.0, whole - attention - tokens.layer(0, 1)), "pass_s": max(0.0, rest)}


@torch.no_grad()
def _passed(model: Any) -> Tensor:
    logits: Tensor = model(torch.zeros((1, 1), dtype=torch.int64), use_cache=True).logits
    return logits
