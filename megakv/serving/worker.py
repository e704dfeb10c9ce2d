"""What every rank does with a plan: caches and spans by the numbers that rank 0 gave them, and passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from megakv.cache.cache import ShardedCache
from megakv.distributed.comm import Communicator
from megakv.fairkv.observation import Turn
from megakv.forward.pauses import Pauses
from megakv.serving.plan import Attach, Await, Close, Keep, Plan
from megakv.serving.prefix_store import PrefixStore

BLOCK_TOKENS = 2048
"""Of a prompt that is read in small chunks, memory is taken for so many at a time, at most: with each new piece, where
rows lie is found anew."""
BLOCK_SHARE = 2
"""One part in so many of what is there already, at most: a prompt may end early, and what is kept of it keeps the
piece."""


class ServedEngine(Protocol):
    """What serving needs of an engine."""

    def new_cache(self, *, forgets: bool, compresses: bool) -> ShardedCache: ...
    def extend(
        self,
        caches: Sequence[ShardedCache],
        tokens: Sequence[Sequence[int]],
        *,
        pauses: Pauses | None,
        turn: Turn | None,
    ) -> Tensor: ...


class Worker:
    """One rank's caches and kept spans."""

    def __init__(self, engine: ServedEngine, comm: Communicator, store: PrefixStore):
        self._engine, self._comm, self._store = engine, comm, store
        self._caches: dict[int, ShardedCache] = {}
        self._turns: dict[int, Turn] = {}
        # Of those that are read, how many tokens their prompts have.
        self._prompts: dict[int, int] = {}

    def prepare(self, plan: Plan) -> dict[int, str]:
        """Carry out a plan's commands; what of the disk could not be read, by node, on any rank, and why."""
        unread: dict[int, str] = {}
        if plan.reset:
            for cache in self._caches.values():
                cache.reset()
            self._caches.clear()
            self._turns.clear()
            self._prompts.clear()
            self._store.forget()
        for command in plan.commands:
            match command:
                case Keep():
                    self._store.keep(command, self._caches[command.sequence])
                case Attach(sequence, nodes, prompt, compresses):
                    if sequence not in self._caches:
                        self._caches[sequence] = self._engine.new_cache(forgets=False, compresses=compresses)
                        self._prompts[sequence] = prompt
                    if compresses:
                        self._turns[sequence] = Turn(0, prompt)
                    self._store.attach(nodes, self._caches[sequence])
                case Close(sequence):
                    # Whoever still knows it holds no memory.
                    self._caches.pop(sequence).reset()
                    self._turns.pop(sequence, None)
                    self._prompts.pop(sequence, None)
                case Await():
                    for failed in self._comm.gather_objects(self._store.receive(command)):
                        unread |= failed
                    self._store.discard(unread)
                case _:
                    self._store.arrange(command)
        return unread

    def held(self, sequence: int) -> tuple[int, ...]:
        """How many tokens of a cache every context-parallel rank has."""
        return tuple(self._caches[sequence].table.counts().sum(1).tolist())

    def compute(self, plan: Plan, pauses: Pauses | None) -> Tensor | None:
        """Carry out its pass: the logits behind the last new token of each sequence."""
        if not plan.sequences:
            return None
        caches = [self._caches[sequence] for sequence in plan.sequences]
        for sequence, cache, tokens in zip(plan.sequences, caches, plan.tokens, strict=True):
            if (prompt := self._prompts.get(sequence, 0)) > cache.length:
                new = blocks(cache.length, len(tokens), len(cache.layers))
                cache.preallocate([min(prompt, cache.length + block) for block in new])
            else:
                self._prompts.pop(sequence, None)
        turn = self._turns.get(plan.sequences[0])
        return self._engine.extend(caches, plan.tokens, pauses=pauses, turn=turn)


def blocks(held: int, new: int, layers: int) -> list[int]:
    """Tokens that each layer's memory is taken for where so many more come behind those that are there: whole chunks.

    New memory takes time: not all layers' are of one size, so that they take it in different passes.
    """
    most = max(min(BLOCK_TOKENS, held // BLOCK_SHARE) // new, 1)
    return [(most - layer % (most // 2 + 1)) * new for layer in range(layers)]
