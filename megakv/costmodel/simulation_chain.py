"""The runahead chain as a program of the simulator (KV-Runahead, Section 4.1)."""

from __future__ import annotations

from collections.abc import Sequence

from megakv.attention.chain import HELD, OPERATION
from megakv.costmodel.chain import ChainParts
from megakv.costmodel.simulation_program import Program
from megakv.costmodel.timeline import LayerWork


class ChainTasks:
    """Tasks of one column of the mesh, whose ranks are the links of a chain.

    A message sets out behind the one before, once it is there to be sent, and once the rank that receives it has room:
    when all but `HELD` of those before were attended to.

    ranks: first link first.
    works: of each link.
    """

    def __init__(self, program: Program, ranks: Sequence[int], parts: ChainParts, works: Sequence[LayerWork]):
        self._program = program
        self._ranks = ranks
        self._parts = parts
        self._works = works
        # Per link, over all layers: messages that it receives, and its attention to them.
        self._messages: list[list[int]] = [[] for _ in ranks]
        self._attended: list[list[int]] = [[] for _ in ranks]

    def add_layer(self, layer: int, row_bytes: int, last: list[list[int]], sums_s: Sequence[float]) -> None:
        """Add a layer of all links.

        row_bytes: of one token's keys and values.
        last: what each rank of the world did last; brought up to date.
        sums_s: per link, what part of the work behind attention is sums over tensor-parallel ranks: left to the caller.
        """
        for place, rank in enumerate(self._ranks):
            work, program = self._works[place], self._program
            sends = place < len(self._parts.links)
            projected = program.compute("dense", rank, float(work.before[layer]), last[rank], layer=layer)
            number = 0
            if sends:
                for tokens in self._parts.messages[place]:
                    self._send(place, number, sum(tokens), row_bytes, layer, (projected,))
                    number += 1
            done = program.compute("attention", rank, float(work.local[layer]), (projected,), layer=layer)
            count = len(self._parts.incoming[place])
            arriving = self._messages[place][layer * count :]
            for chunk, (_, tokens) in enumerate(self._parts.incoming[place]):
                before = (done, arriving[chunk])
                if sends:
                    # What arrives is handed on when it is taken up.
                    self._send(place, number, sum(tokens), row_bytes, layer, before)
                    number += 1
                done = program.compute("attention", rank, float(work.chunks[layer, chunk]), before, layer=layer)
                self._free(place, done)
            after = float(work.after[layer]) - sums_s[place]
            last[rank] = [program.compute("dense", rank, after, (done,), layer=layer)]

    def _send(self, place: int, number: int, tokens: int, row_bytes: int, layer: int, after: tuple[int, ...]) -> None:
        messages, attended = self._messages[place + 1], self._attended[place + 1]
        waits = [*after, *messages[-1:]]
        freeing = len(messages) - HELD
        if 0 <= freeing < len(attended):
            waits.append(attended[freeing])
        index = self._program.send(
            OPERATION,
            self._ranks[place],
            self._ranks[place + 1],
            float(self._parts.links[place][number]),
            waits,
            nbytes=row_bytes * tokens,
            layer=layer,
        )
        messages.append(index)

    def _free(self, place: int, done: int) -> None:
        """A message was attended to: another one may come."""
        coming = len(self._attended[place]) + HELD
        self._attended[place].append(done)
        if coming < len(self._messages[place]):
            self._program.waits.append((self._messages[place][coming], done))
