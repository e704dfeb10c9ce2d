"""Nodes of the tree of kept prefixes, and the files that they are in."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from megakv.serving.plan import StoredPart
from megakv.serving.stats import Document
from megakv.tracking.served import Tier

Tokens = NDArray[np.int32]
BEYOND = np.int32(1 << 30)
"""Bit of a token whose rotary frequencies are those beyond the original length: no vocabulary is as large."""
BEGINNING = 64
"""First tokens by which people know a document."""


@dataclass(eq=False)
class Node:
    """Tokens behind those of its parent; `end` counts them all, from the beginning."""

    id: int
    tokens: Tokens
    parent: Node | None
    end: int
    memory: Tier | None = None
    """Where its span is in memory, ``device`` or ``host``; None where it is on disk alone."""
    stored: StoredPart | None = None
    loading: bool = False
    uses: int = 0
    """Running sequences that begin with it."""
    used_at: float = 0.0
    hits: int = 0
    children: dict[int, Node] = field(default_factory=dict)

    @property
    def tier(self) -> Tier:
        return self.memory or "disk"

    def path(self) -> list[Node]:
        """From the first behind the root to this node."""
        nodes = []
        node: Node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def document(self, now: float) -> Document:
        """What to say of all up to its end."""
        path = self.path()
        beginning: list[int] = []
        for node in path:
            beginning += (node.tokens[: BEGINNING - len(beginning)] & ~BEYOND).tolist()
        tiers: list[Tier] = ["device", "host", "disk"]
        tier = max((node.tier for node in path), key=tiers.index)
        return Document(self.id, self.end, tuple(beginning), tier, now - self.used_at, path[0].hits)


@dataclass(eq=False)
class StoredFile:
    """What one key stands for on disk, over all ranks."""

    key: str
    nbytes: int
    nodes: list[Node]


class StoredFiles:
    """Files on disk, the least recently used first; each is there as long as any node is in it."""

    def __init__(self) -> None:
        self._files: OrderedDict[str, StoredFile] = OrderedDict()
        self.nbytes = self.tokens = 0

    def __iter__(self) -> Iterator[StoredFile]:
        return iter(list(self._files.values()))

    def add(self, node: Node, part: StoredPart, nbytes: int) -> None:
        """A node gets a file."""
        node.stored = part
        self._files[part.key] = StoredFile(part.key, nbytes, [node])
        self.nbytes += nbytes
        self.tokens += len(node.tokens)

    def size(self, key: str) -> int:
        """Bytes of a file; 0 if it is there no more."""
        return self._files[key].nbytes if key in self._files else 0

    def use(self, node: Node) -> None:
        """A node's file, if it has one, was used last."""
        if node.stored is not None:
            self._files.move_to_end(node.stored.key)

    def split(self, node: Node, head: Node) -> None:
        """The first tokens of a node have become those of `head`."""
        if (part := node.stored) is not None:
            middle = part.first + len(head.tokens)
            head.stored, node.stored = replace(part, last=middle), replace(part, first=middle)
            self._files[part.key].nodes.append(head)

    def leave(self, node: Node) -> str | None:
        """A node is not on disk any more; the key of its file, if nobody is in it now."""
        if (part := node.stored) is None:
            return None
        file, node.stored = self._files[part.key], None
        file.nodes.remove(node)
        self.tokens -= len(node.tokens)
        if file.nodes:
            return None
        del self._files[part.key]
        self.nbytes -= file.nbytes
        return part.key


@dataclass(frozen=True)
class FoundPrefix:
    """A file that an earlier server left: `tokens`, which come behind the first `at` ones of the file `parent`."""

    key: str
    tokens: Tokens
    parent: str | None
    at: int
    cp: int
    nbytes: int
    used_at: float


def walk(node: Node) -> Iterator[Node]:
    """A node and all behind it, parents first."""
    stack = [node]
    while stack:
        each = stack.pop()
        yield each
        stack.extend(each.children.values())


def common(first: Tokens, second: Tokens) -> int:
    """How many tokens two sequences have in common at their beginnings."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length
