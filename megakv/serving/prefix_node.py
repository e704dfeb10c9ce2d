"""Nodes of the tree of kept prefixes, and the files that they are in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megakv.serving.plan import StoredPart
from megakv.serving.stats import Tier

Tokens = NDArray[np.int32]


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


@dataclass(eq=False)
class StoredFile:
    """What one key stands for on disk, over all ranks."""

    key: str
    nbytes: int
    nodes: list[Node]


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
