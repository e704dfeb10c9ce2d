"""Caches and kept spans of a rank by the numbers that rank 0 gave them, and passes over them."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future

import torch
from torch import Tensor

from megakv.cache.cache import ShardedCache
from megakv.cache.span import CacheSpan
from megakv.distributed.comm import Communicator
from megakv.engine.engine import MegaKVEngine
from megakv.fairkv.observation import Turn
from megakv.serving.plan import Attach, Await, Close, Crop, Drop, Erase, Keep, Load, Move, Plan, Split, Write
from megakv.serving.prefix_folder import PrefixFolder

HOST = torch.device("cpu")


class PrefixStore:
    """Spans by node. Every rank does the same with its own; what is where is decided by rank 0."""

    def __init__(self, device: torch.device, folder: PrefixFolder | None):
        self._device, self._folder = device, folder
        self._spans: dict[int, CacheSpan] = {}
        self._coming: dict[int, Future[CacheSpan]] = {}

    def __len__(self) -> int:
        return len(self._spans)

    def keep(self, command: Keep, cache: ShardedCache) -> None:
        """Share what a cache holds."""
        self._spans[command.node] = cache.span(command.first, command.last)

    def attach(self, nodes: tuple[int, ...], cache: ShardedCache) -> None:
        """Append spans to a cache."""
        for node in nodes:
            cache.append_span(self._spans[node])

    def arrange(self, command: Split | Move | Drop | Write | Load | Erase) -> None:
        """Do what there is to do with a span, or a file."""
        match command:
            case Split(node, head, at):
                self._split(node, head, at)
            case Move(node, to_host):
                self._spans[node] = self._spans[node].to(HOST if to_host else self._device)
            case Drop(node):
                self._spans.pop(node, None)
                self._coming.pop(node, None)
            case Write(node, key):
                assert self._folder is not None
                self._folder.write(key, self._spans[node])
            case Load(node, part):
                assert self._folder is not None
                self._coming[node] = self._folder.read(part, self._device)
            case Erase(key):
                assert self._folder is not None
                self._folder.erase(key)

    def _split(self, node: int, head: int, at: int) -> None:
        if (coming := self._coming.get(node)) is None:
            self._spans[head], self._spans[node] = _cut(self._spans[node], at)
            return
        front: Future[CacheSpan] = Future()
        back: Future[CacheSpan] = Future()
        self._coming[head], self._coming[node] = front, back

        def cut(done: Future[CacheSpan]) -> None:
            if (error := done.exception()) is not None:
                front.set_exception(error)
                back.set_exception(error)
                return
            for half, future in zip(_cut(done.result(), at), (front, back), strict=True):
                future.set_result(half)

        coming.add_done_callback(cut)

    def is_here(self, node: int) -> bool:
        """Whether a span that is to be read has been: of one that was only just planned nothing has begun."""
        return node in self._coming and self._coming[node].done()

    def receive(self, command: Await) -> dict[int, str]:
        """Wait for what is being read; what could not be, and why."""
        failed = {}
        for node in command.nodes:
            future = self._coming.pop(node, None)
            if future is None:
                continue
            try:
                self._spans[node] = future.result()
            except Exception as error:
                # Whatever it was, no memory included: what cannot be had is computed.
                failed[node] = str(error) or type(error).__name__
        return failed

    def discard(self, nodes: Iterable[int]) -> None:
        """Do without what some rank could not read."""
        for node in nodes:
            self._spans.pop(node, None)

    def forget(self) -> None:
        """Hold nothing in memory."""
        self._spans.clear()
        self._coming.clear()


def _cut(span: CacheSpan, tokens: int) -> tuple[CacheSpan, CacheSpan]:
    """Its first tokens, and the others."""
    return span.split(span.first + tokens)


BLOCK_TOKENS = 2048
"""Of a prompt that is read in small chunks, memory is taken for so many at a time, at most: with each new piece, where
rows lie is found anew."""
BLOCK_SHARE = 2
"""One part in so many of what is there already, at most: a prompt may end early, and what is kept of it keeps the
piece."""


class Worker:
    """One rank's caches and kept spans."""

    def __init__(self, engine: MegaKVEngine, comm: Communicator, store: PrefixStore):
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
                case Crop(sequence, tokens):
                    self._caches[sequence].cut_back(tokens)
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

    def compute(self, plan: Plan) -> Tensor | None:
        """Carry out its pass: the logits behind the last new token of each sequence, and behind candidates."""
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
        return self._engine.extend(caches, plan.tokens, turn=turn, candidates=plan.candidates, longest=plan.longest)


def blocks(held: int, new: int, layers: int) -> list[int]:
    """Tokens that each layer's memory is taken for where so many more come behind those that are there: whole chunks.

    New memory takes time: not all layers' are of one size, so that they take it in different passes.
    """
    most = max(min(BLOCK_TOKENS, held // BLOCK_SHARE) // new, 1)
    return [(most - layer % (most // 2 + 1)) * new for layer in range(layers)]
