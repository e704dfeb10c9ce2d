"""What a rank keeps of prefixes: spans of caches by the nodes of rank 0's tree, in memory, or coming from disk."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future

import torch

from megakv.cache.cache import ShardedCache
from megakv.cache.span import CacheSpan
from megakv.serving.plan import Await, Drop, Erase, Keep, Load, Move, Split, Write
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
