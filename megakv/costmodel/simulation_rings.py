"""Attention layers of the ring methods as programs of the simulator."""

from __future__ import annotations

from collections.abc import Sequence

from megakv.costmodel.context_parallel import sent_bytes
from megakv.costmodel.ring_steps import LayerSteps
from megakv.costmodel.simulation_program import Program

RINGS = ("pass_kv", "pass_q")


class RingTasks:
    """Tasks of one kind of layer.

    method: ``pass_kv``, ``pass_q``, ``all_gather``, ``tsp`` or ``tsp_causal``.
    new, kept: per context-parallel rank, tokens that it computes, and holds.
    Raises ValueError: for a prompt of fewer than 2N tokens.
    """

    def __init__(self, times: LayerSteps, method: str, new: Sequence[int], kept: Sequence[int]):
        self._method = method
        self._size = len(new)
        self._steps = [times.steps(method, place) for place in range(self._size)]
        predicted = times.predict(method)
        # Kernels are issued while those before them compute, but not past a collective, which all ranks wait in.
        self.busy_s = predicted.seconds - predicted.terms.get("collective", 0.0)
        shape = times.shape
        row, shards = (shape.query_row_bytes, new) if method == "pass_q" else (shape.kv_row_bytes, kept)
        self._shard_bytes = [row * count for count in shards]
        self._return_bytes = [(sum(new) - count) * shape.partial_row_bytes for count in new]
        self._gathered_bytes = [
            sum(sent_bytes(method, shape, new=new, kept=kept, rank=place).values()) for place in range(self._size)
        ]

    def add_attention(self, program: Program, last: list[list[int]], ranks: Sequence[int], layer: int) -> None:
        """Add one layer of one column of the mesh.

        last: what each rank of the world did last; brought up to date.
        ranks: those of the column.
        """
        travelling = self._method in RINGS and self._size > 1
        for place, rank in enumerate(ranks):
            if self._steps[place].pack_s:
                last[rank] = [program.compute("dense", rank, self._steps[place].pack_s, last[rank], layer=layer)]
        if not travelling and self._size > 1:
            self._meet(program, last, ranks, layer, "all_gather", self._steps[0].gather_s, self._gathered_bytes)
        for step in range(self._size):
            if self._steps[0].overhead_s:
                for rank in ranks:
                    seconds = self._steps[0].overhead_s
                    last[rank] = [program.compute("attention", rank, seconds, last[rank], layer=layer)]
            arriving: list[list[int]] = [[] for _ in ranks]
            if travelling and step + 1 < self._size:
                self._pass_on(program, last, ranks, layer, step, arriving)
            for place, rank in enumerate(ranks):
                done = program.compute("attention", rank, self._steps[place].busy_s[step], last[rank], layer=layer)
                last[rank] = [done, *arriving[place]]
        if travelling and self._method == "pass_q":
            for place, rank in enumerate(ranks):
                last[rank] = [program.compute("dense", rank, self._steps[place].unpack_s, last[rank], layer=layer)]
            seconds = max(each.return_s for each in self._steps)
            self._meet(program, last, ranks, layer, "pass_q_return", seconds, self._return_bytes)
            for place, rank in enumerate(ranks):
                last[rank] = [program.compute("attention", rank, self._steps[place].combine_s, last[rank], layer=layer)]

    def _pass_on(
        self,
        program: Program,
        last: list[list[int]],
        ranks: Sequence[int],
        layer: int,
        step: int,
        arriving: list[list[int]],
    ) -> None:
        """Every rank sends the next one what it works on; both must be at this step: the receive is posted there."""
        for place, rank in enumerate(ranks):
            behind = (place + 1) % self._size
            index = program.send(
                self._method,
                rank,
                ranks[behind],
                self._steps[place].transfer_s,
                [*last[rank], *last[ranks[behind]]],
                nbytes=self._shard_bytes[(place - step) % self._size],
                layer=layer,
            )
            arriving[place].append(index)
            arriving[behind].append(index)

    def _meet(
        self,
        program: Program,
        last: list[list[int]],
        ranks: Sequence[int],
        layer: int,
        name: str,
        seconds: float,
        nbytes: Sequence[int],
    ) -> None:
        ready = [index for rank in ranks for index in last[rank]]
        parts = program.collective(name, ranks, seconds, ready, nbytes=nbytes, layer=layer)
        for rank, index in zip(ranks, parts, strict=True):
            last[rank] = [index]
