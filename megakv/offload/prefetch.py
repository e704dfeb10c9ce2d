"""Which groups of which layers are in the buffers on the accelerator, or on their way there."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import numpy as np
import torch

from megakv.base.errors import MegaKVError
from megakv.distributed.sharding import Layout, TokenTable
from megakv.offload.bodies import TieredBody
from megakv.offload.cache import OffloadedCache, groups_of
from megakv.offload.link import Link, Move
from megakv.offload.method import Plan, Split, spread
from megakv.offload.planner import Planner
from megakv.offload.reach import OutOfWindow, Windows
from megakv.offload.staging import Chunk, StagedLayer, StagingBuffer
from megakv.offload.store import Strip, TieredStore

BUFFERS = 2


class Prefetch:
    """Brings groups of sequences, layer by layer, in the order in which they are attended to.

    Of the pass under way it knows the `groups` that each layer attends to one behind the other, and how many `new`
    tokens each sequence has. `windows` are those of the layers, as their attention showed them.
    """

    def __init__(self, planner: Planner, link: Link, *, layers: int, device: torch.device):
        self.groups: list[range] = []
        self.new: list[int] = []
        self.windows: Windows = [None] * layers
        self._planner, self._link, self._layers = planner, link, layers
        self._cache: OffloadedCache | None = None
        self._stays = True
        self._hidden: OutOfWindow
        # What compression kept of each group, as the planner takes it.
        self._kept: list[tuple[float, float]] = []
        self._free = [StagingBuffer(device) for _ in range(BUFFERS)]
        self._staged: dict[tuple[int, int], StagedLayer] = {}

    def __len__(self) -> int:
        return len(self._staged)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(b.nbytes for b in self._free) + sum(staged.buffer.nbytes for staged in self._staged.values())

    def enter(
        self, cache: OffloadedCache, table: TokenTable, layout: Layout, *, groups: int, stays: bool, turn: bool
    ) -> bool:
        """A pass over a cache begins, its new tokens in the table; whether what was brought ahead is of use, if any.

        Its sequences go through layers in `groups`, or fewer.

        Of compressed tokens the table has none. Those of a `turn` that may be compressed need no place in the buffers.
        `stays` says whether cached rows are attended to where they lie: only then may the host attend to some.
        """
        new = [np.diff(block.bounds).tolist() for block in layout.stored]
        same, self._cache = self._cache is cache, cache
        self.groups, self._stays = groups_of(layout, groups), stays
        self.new = [0] * len(new[cache.rank]) if turn else new[cache.rank]
        self._hidden = OutOfWindow(self.windows, table, cache.rank, new)
        self._kept = [cache.kept(group) for group in self.groups]
        useful = same and all(self._valid(staged, cache, layer) for (layer, _), staged in self._staged.items())
        ready = useful or not self._staged
        if not useful:
            self.drop_all()
        return ready

    def _valid(self, staged: StagedLayer, cache: OffloadedCache, layer: int) -> bool:
        """Whether what was brought is what the pass needs."""
        capacity, group, new = staged.capacity, staged.group, self.new
        fits = len(new) == len(capacity) and all(new[sequence] <= capacity[sequence] for sequence in group)
        fits = fits and group in self.groups and (self._stays or not staged.host_attends)
        fits = fits and [*staged.bodies, *staged.left] == cache.bodies(layer, group)
        strips = zip((staged, *staged.shared), cache.strips(layer), strict=True) if fits else ()
        return fits and all(
            each.version == strip.store.version and each.cached == _within(group, strip.store.lengths())
            for each, strip in strips
        )

    def plan(self, store: TieredStore, *, beyond: bool = False) -> Plan:
        """What becomes of the cached tokens of a layer, in this step or the next."""
        assert self._cache is not None
        out_of_window = self._hidden.in_the_mean(beyond=beyond)
        return self._planner.plan(
            store.cached_before_step(),
            partial(self._cache.references, store),
            self.groups,
            out_of_window,
            stays=self._stays,
            kept=self._kept,
            beyond=beyond,
        )

    def begin(self) -> None:
        """Bring the first groups of a pass."""
        for unit in range(min(BUFFERS, self._layers * len(self.groups))):
            self._stage(*divmod(unit, len(self.groups)))

    def follow(self, layer: int, index: int, *, beyond: bool) -> None:
        """A group was attended to: give its buffer to those that come next.

        With `beyond` the next step's first groups may come too: one more token of each sequence. Rows of this step are
        in their tiers or on the way there.
        """
        staged = self._staged.pop((layer, index), None)
        if staged is not None:
            staged.settle()
            self._free.append(staged.buffer)
        count = len(self.groups)
        unit, units = layer * count + index, self._layers * count
        for following in range(unit + 1, unit + BUFFERS + 1):
            if following < units:
                self._stage(*divmod(following, count))
            elif beyond and following - units <= unit:
                self._stage(*divmod(following - units, count), beyond=True)

    def _stage(self, layer: int, index: int, *, beyond: bool = False) -> None:
        """Begin to bring a group's rows in a layer, if there is a buffer and anything to bring."""
        assert self._cache is not None
        if (layer, index) in self._staged or not self._free or not self._cached(layer, index):
            return
        strips, group = self._cache.strips(layer), self.groups[index]
        for strip in strips:
            strip.store.flush()
        store = strips[0].store
        plan = self.plan(store, beyond=beyond)
        new, out_of_window = [1] * len(self.new) if beyond else self.new, self._hidden.in_layer(layer, beyond=beyond)
        buffer, split = self._free.pop(), plan.splits[index]
        given = group, buffer, split, new, out_of_window
        placed = [_placed(strip, number, *given) for number, strip in enumerate(strips)]
        staged = self._staged[layer, index] = placed[0]
        staged.shared = placed[1:]
        _bring_inputs(store, staged, self._link, split.chunk)
        bodies = self._cache.bodies(layer, group)
        if plan.kept_on_host:
            staged.left, bodies = bodies, []
        moves = _bring_bodies(staged, bodies)
        for number, (strip, own) in enumerate(zip(strips, placed, strict=True)):
            moves += _bring_rows(strip.store, number, own)
        if moves:
            transfer = self._link.start("in", moves)
            for own in placed:
                own.streamed = transfer

    def _cached(self, layer: int, index: int) -> bool:
        """Whether there is anything to bring of a group in a layer."""
        assert self._cache is not None
        group = self.groups[index]
        store = self._cache.tier(layer)
        counts = store.cached_before_step()
        rows = any(counts[sequence] > store.gone(sequence) for sequence in group)
        return rows or bool(self._cache.bodies(layer, group))

    def ensure(self, layer: int, index: int) -> StagedLayer | None:
        """A group of a layer, brought now if it was not before; None if it has no cached tokens."""
        if (layer, index) not in self._staged:
            if self._cached(layer, index):
                self.drop_all()
                self._stage(layer, index)
        return self._staged.get((layer, index))

    def drop_all(self) -> None:
        """Forget what was brought, whether or not it came."""
        for unit in list(self._staged):
            staged = self._staged.pop(unit)
            with suppress(MegaKVError):
                staged.settle()
            self._free.append(staged.buffer)


def _within(group: range, counts: Sequence[int]) -> list[int]:
    """Counts per sequence, 0 for those outside a group."""
    return [count if sequence in group else 0 for sequence, count in enumerate(counts)]


def _placed(
    strip: Strip,
    number: int,
    group: range,
    buffer: StagingBuffer,
    split: Split,
    new: list[int],
    out_of_window: Sequence[int],
) -> StagedLayer:
    """Where a group's rows of a strip will lie in a buffer, by the split of its cached tokens in the mean layer.

    Everything appended to the store was sent to its tier. Room is left for `new` tokens of each sequence; the layer's
    window leaves out the first `out_of_window` ones.
    """
    store = strip.store
    cached, new = _within(group, store.cached_before_step()), _within(group, new)
    # Of a turn that may be compressed no row is in the store yet, however many are hidden.
    firsts = (max(strip.before(row, first), store.gone(row)) for row, first in enumerate(out_of_window))
    out_of_window = [min(each) for each in zip(firsts, cached, strict=True)]
    if any(out_of_window) or sum(cached) != split.tokens:
        split = split.of_tokens(sum(cached) - sum(out_of_window))
    # A later layer may have more on disk than the one that was split.
    memory = [max(0, min(each) - first) for first, *each in zip(out_of_window, store.in_memory(), cached, strict=True)]
    on_host = spread(min(split.on_host, sum(memory)), memory)
    away = [first + count for first, count in zip(out_of_window, on_host, strict=True)]
    inputs = [max(0, min(each) - first) for first, *each in zip(away, store.with_inputs(), cached, strict=True)]
    splits = spread(min(split.recomputed, sum(inputs)), inputs)
    sizes = [count - first + capacity for count, first, capacity in zip(cached, away, new, strict=True)]
    starts = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    rows = buffer.take(f"rows {number}", starts[-1], store.row_width, store.dtype)
    return StagedLayer(store, store.version, group, buffer, rows, starts[:-1], cached, new, splits, out_of_window, away)


def _bring_rows(store: TieredStore, number: int, staged: StagedLayer) -> list[Move]:
    """Copies of a strip's rows that are not recomputed to their places; what is resident is put there."""
    rows, cached, runs = staged.rows, staged.cached, list[tuple[int, int, int, int]]()
    packed = None
    if store.quantiser is not None:
        streamed = sum(cached) - sum(staged.away) - sum(staged.splits)
        packed = staged.buffer.take(f"packed {number}", streamed, store.stored_width, store.stored_dtype)
        staged.packed = packed
    filled = 0
    for sequence in staged.group:
        count = cached[sequence]
        begin = staged.away[sequence] + staged.splits[sequence]
        spans = [(begin, count)]
        resident = store.residents.rows[sequence] if count else None
        if resident is not None and begin < resident.end:
            kept = max(begin, resident.first)
            spans = [(begin, kept), (resident.end, count)]
            staged.resident += resident.end - kept
            place = slice(staged.row(sequence, kept), staged.row(sequence, resident.end))
            rows[place] = resident.rows[kept - resident.first :]
        for first, last in spans:
            if first < last:
                row = staged.row(sequence, first)
                if packed is not None:
                    staged.unpacking.append((row, last - first))
                    row, filled = filled, filled + last - first
                runs.append((sequence, first, last - first, row))
    return store.moves(rows if packed is None else packed, runs)


def _bring_bodies(staged: StagedLayer, bodies: Sequence[TieredBody]) -> list[Move]:
    """Places for what compression kept, and copies to them."""
    moves: list[Move] = []
    if bodies:
        first, like, tokens = 0, bodies[0], sum(body.tokens for body in bodies)
        block = staged.buffer.take("bodies", tokens, like.width, like.dtype)
        packed = None
        if like.quantiser is not None:
            packed = staged.buffer.take("packed bodies", tokens, like.quantiser.nbytes, torch.uint8)
        for body in bodies:
            span = slice(first, first + body.tokens)
            staged.bodies[body], first, own = body.within(block[span]), span.stop, block[span]
            if packed is not None:
                own = packed[span]
                staged.unpacking_bodies.append(partial(body.unpack, own, staged.bodies[body]))
            moves += body.moves(own)
    return moves


def _bring_inputs(store: TieredStore, staged: StagedLayer, link: Link, size: int) -> None:
    """Begin to bring activations, a transfer for each chunk of so many tokens."""
    total = sum(staged.splits)
    if not total:
        return
    inputs = staged.buffer.take("inputs", total, store.input_width, store.dtype)
    runs: list[tuple[int, int, int, int]] = []
    filled = begun = 0
    for sequence, split in enumerate(staged.splits):
        first = staged.away[sequence]
        last = first + split
        while first < last:
            count = min(last - first, size - (filled - begun))
            runs.append((sequence, first, count, filled))
            first, filled = first + count, filled + count
            if filled - begun == size or filled == total:
                transfer = link.start("in", store.moves(inputs, runs, inputs=True))
                staged.chunks.append(Chunk(inputs[begun:filled], runs, transfer))
                runs, begun = [], filled
