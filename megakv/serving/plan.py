"""What rank 0 tells all ranks to do next: what becomes of kept prefixes and caches, then a pass."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoredPart:
    """Where a span lies on disk: tokens [first, last) of what is in a file of that key on every rank."""

    key: str
    first: int
    last: int
    cp: int
    """Context-parallel degree of the ranks that wrote it."""


@dataclass(frozen=True, slots=True)
class Split:
    """A node's span is cut at a token: `head` gets what comes before, the node keeps what comes behind."""

    node: int
    head: int
    at: int


@dataclass(frozen=True, slots=True)
class Keep:
    """Slots [first, last) of a sequence's cache become the span of a new node."""

    node: int
    sequence: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Attach:
    """Spans of nodes are appended to a sequence's cache, which is made if it is new, for so many tokens of a prompt.

    One that `compresses` does when those have been read. Its passes have no other sequence.
    """

    sequence: int
    nodes: tuple[int, ...]
    prompt: int = 0
    compresses: bool = False


@dataclass(frozen=True, slots=True)
class Close:
    """A sequence has ended, or makes room for another."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Crop:
    """A sequence's cache keeps so many tokens: what comes behind them was proposed, and is wrong."""

    sequence: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Move:
    """A node's span goes to host memory, or back from there."""

    node: int
    to_host: bool


@dataclass(frozen=True, slots=True)
class Drop:
    """A node's span leaves memory; it may be on disk."""

    node: int


@dataclass(frozen=True, slots=True)
class Write:
    """Begin to write a node's span, which is in memory, to a file of that key, beside the passes."""

    node: int
    key: str


@dataclass(frozen=True, slots=True)
class Load:
    """Begin to read a node's span from disk, beside the passes."""

    node: int
    part: StoredPart


@dataclass(frozen=True, slots=True)
class Await:
    """Wait for what is being read for these nodes; all ranks learn which of it could not be."""

    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Erase:
    """A file on disk is not needed any more."""

    key: str


Command = Split | Keep | Attach | Close | Crop | Move | Drop | Write | Load | Await | Erase


@dataclass(frozen=True, slots=True)
class Plan:
    """Commands in their order, then one pass over new tokens of some sequences, if there are any."""

    commands: tuple[Command, ...] = ()
    sequences: tuple[int, ...] = ()
    tokens: tuple[tuple[int, ...], ...] = ()
    """New ones of each of them."""
    candidates: tuple[int, ...] = ()
    """How many of them, the last ones, are candidates; empty where none of any sequence are."""
    longest: int = 0
    """Length that rotary frequencies of the pass go by, where they follow the length."""
    reset: bool = False
    """Forget all that is in memory, before anything else: ranks may hold different things after a failure."""
    reports: bool = False
    """Tell rank 0 of each rank's memory, last."""
    ends: bool = False
    """There will be no other."""
    error: str = ""
    """There will be no other for this reason."""
