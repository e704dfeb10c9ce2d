"""One call of the model, as all ranks see it: a plan made before any layer runs, and a small state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from megakv.attention.device_step import LayerKind, StepTables
from megakv.attention.methods import METHODS
from megakv.attention.step import TokenStep
from megakv.cache.cache import ShardedCache
from megakv.costmodel.context_parallel import Workload
from megakv.distributed.sharding import IntArray, Layout, TokenBlock
from megakv.fairkv.compression_plan import CompressionPlan
from megakv.fairkv.observation import Turn

T = TypeVar("T")
LONGEST = "longest"
"""Argument of a pass, which no model takes: the length that rotary frequencies go by, where they follow it."""


@dataclass(frozen=True)
class Wanted:
    """Logits asked for: which tokens, and where they go in the output."""

    sequence: IntArray
    slot: IntArray
    column: IntArray
    columns: int
    picked: IntArray | None
    """Which of the columns are given back, in which order; None for each once."""
    flat: bool = False
    """Whether they are one row of the output, sequence behind sequence: of each another number is asked for."""

    @classmethod
    def of(cls, keep: Any, new: NDArray[np.bool_], pasts: IntArray) -> Wanted:
        """What ``logits_to_keep`` asks for of new slots ``[B, T]`` behind ``[B]``, of which some are padding.

        A NumPy array ``[B]`` asks for so many last ones of each row, which has padding on its right alone.

        Raises
        ------
        ValueError
            If columns are asked for that there are not.
        """
        if isinstance(keep, np.ndarray):
            rows, index = np.repeat(np.arange(len(new)), keep), np.arange(keep.sum())
            slots = (pasts + new.sum(1) - np.cumsum(keep))[rows] + index
            return cls(rows, slots, index, len(index), None, flat=True)
        if new.shape[1] == 1 and not isinstance(keep, Tensor) and new.all():
            # As in decoding: many calls for little.
            return cls(np.arange(len(new)), pasts, np.zeros(len(new), dtype=np.int64), 1, None)
        every = np.arange(new.shape[1])
        picked: IntArray | None = None
        if isinstance(keep, Tensor):
            if keep.dim() != 1:
                raise ValueError(
                    f"logits_to_keep has shape {list(keep.shape)}; MegaKV takes a number, or a tensor of one dimension"
                )
            try:
                columns, picked = np.unique(every[keep.detach().cpu().numpy()], return_inverse=True)
            except IndexError as error:
                raise ValueError(f"logits_to_keep = {keep.tolist()} does not fit {len(every)} new tokens") from error
        else:
            columns = every[-keep:]
        if len(columns) == 1 and columns[0] == len(every) - 1:
            # The last real token of each row: what follows it is asked for, also where padding is on the right.
            last = len(every) - 1 - np.argmax(new[:, ::-1], axis=1)
            rows = np.flatnonzero(new.any(axis=1))
            return cls(rows, last[rows] + pasts[rows], np.zeros(len(rows), dtype=np.int64), 1, picked)
        rows, index = np.nonzero(new[:, columns])
        return cls(rows, columns[index] + pasts[rows], index, len(columns), picked)

    def tokens(self, batch: int) -> TokenBlock:
        """Their tokens, of which nobody asks for the position."""
        return TokenBlock(self.sequence, self.slot, self.slot, batch)

    def among(self, tokens: TokenBlock) -> tuple[IntArray, IntArray]:
        """Which of them are among a rank's tokens, and where in its packed row."""
        if not len(tokens) or not len(self.slot):
            return (np.zeros(0, dtype=np.int64),) * 2
        if len(tokens) == len(self.slot) and (tokens.slot == self.slot).all():
            # As in decoding. Rows of both go up by sequence, then by slot.
            if (tokens.sequence == self.sequence).all():
                return (np.arange(len(tokens)),) * 2
        width = 1 + max(int(slots.max()) for slots in (self.slot, tokens.slot))
        wanted, there = (block.sequence * width + block.slot for block in (self, tokens))
        rows = np.searchsorted(there, wanted)
        found = np.flatnonzero(there[np.minimum(rows, len(there) - 1)] == wanted)
        return found, rows[found]


class LastRows(NamedTuple):
    """Of so many packed rows of a pass, those whose results the output head reads; None: all of them."""

    rows: Tensor | None
    length: int
    queries: bool
    """Whether the last attention computes no other queries."""


@dataclass
class Generation:
    """A `generate` call under way."""

    cache: ShardedCache
    prompt: Turn | None = None
    """What it reads first, in however many passes."""
    prompts: int | None = None
    """How many it was given; beams and further answers are copies of them."""
    earlier: Tensor | None = None
    """Logits behind the prompt's pieces so far."""
    proposed: int = 0
    """The last tokens of the pass under way that are candidates, and may be taken back when it is over."""

    def made(self, cache: ShardedCache) -> bool:
        """Whether what comes next of a cache was generated by this call: in every row, one token more."""
        known = cache is self.cache and self.prompt is not None and 0 < self.prompt.stop <= cache.length
        return known and bool(cache.table.counts().sum(0).all())


@dataclass
class PassState:
    """State of a pass while its layers run."""

    ahead: tuple[Tensor, range] | None = None
    """Hidden states behind layers that were computed with an earlier one, and which layers those are."""
    kernel: Any = None
    """What takes the place of PyTorch's layers, if anything does (`megakv.injection.step.StepKernel`)."""
    kinds: dict[int, LayerKind | None] | None = None
    """Where layers are to show how they attend, those that have."""
    device_step: StepTables | None = None
    """Attends in the place of everything else, where a CUDA graph has the step."""
    recomputing: bool = False
    """Whether an attention module is at work on earlier tokens, which this rank alone has."""
    gathered_logits: Tensor | None = None
    """Logits of the output head, where they are the same bits on all ranks."""
    made: dict[Any, Any] = field(default_factory=dict)
    """Values that all layers share, by key."""


@dataclass(frozen=True, eq=False)
class PassPlan:
    """One call of the model: all that is decided before its layers run."""

    layout: Layout
    """Where its tokens are computed and kept."""
    cache: ShardedCache
    method: str | None
    """The attention method of all layers; None where each layer chooses by its shape."""
    slots: int
    """Slots after this pass: of all sequences alike, or, of several caches, more than of any."""
    rank: int
    """This context-parallel rank."""
    wanted: Wanted
    last: LastRows
    """Rows of the last layer whose results the output head reads."""
    workload: Workload | None = None
    """Its new and cached tokens; None where nothing is new."""
    proposed: int = 0
    """How many of its last tokens are candidates, and may be taken back."""
    compression: CompressionPlan = field(default_factory=CompressionPlan)
    generation: Generation | None = None
    token_step: TokenStep | None = None
    """Attends where a layer's rows are in this memory alone; None but for one new token of every sequence."""
    prompt_step: TokenStep | None = None
    """The same of a short prompt that is spread over ranks, where they exchange keys and values in a call of layers."""
    part: int | None = None
    """Which of the groups that layers compute one behind the other (`LayerColumns`); None for all sequences at once."""
    more: bool = False
    """Whether further groups follow in the same layer."""
    use_cache: bool = True
    return_dict: bool = True
    state: PassState = field(default_factory=PassState)

    def once(self, key: Any, make: Callable[[], T]) -> T:
        """What all layers of the pass share: made by the first one that asks."""
        made = self.state.made
        if key not in made:
            made[key] = make()
        return made[key]

    @property
    def local(self) -> IntArray:
        """Packed rows of this rank whose logits are wanted."""
        return self.wanted_of(self.rank)[1]

    @staticmethod
    def wanted_key(rank: int) -> Any:
        """The key under which `once` knows the wanted tokens of a rank."""
        return "wanted of", rank

    def wanted_of(self, rank: int) -> tuple[IntArray, IntArray]:
        """Which of the wanted tokens a rank computes, and in which of its rows."""
        return self.once(self.wanted_key(rank), lambda: self.wanted.among(self.layout.tokens[rank]))

    @property
    def ends_turn(self) -> bool:
        """Whether no later pass belongs to the turn that it compresses."""
        turn = self.compression.turn
        return turn is None or self.slots == turn.stop

    @property
    def batch(self) -> int:
        """Rows of the input."""
        return self.layout.tokens[0].batch

    @cached_property
    def tokens(self) -> TokenBlock:
        """What this rank computes."""
        return self.layout.tokens[self.rank]

    @cached_property
    def complete(self) -> bool:
        """Whether attention finds all tokens on every rank that has their KV head, shared or not: where nothing was
        cached, and there are context-parallel ranks, whose methods know of whole heads only.
        """
        return self.layout.size > 1 and self.cache.length == 0

    @cached_property
    def slices(self) -> bool:
        """Whether each context-parallel rank computes its slice of every linear."""
        return self.layout.size > 1 and self.method is not None and METHODS[self.method].slices_linears

    @property
    def stays(self) -> bool:
        """Whether cached keys and values stay with the rank that holds them, and queries come to them."""
        return self.layout.size == 1 or (self.method is not None and METHODS[self.method].keys_stay)
