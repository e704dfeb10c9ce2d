"""The offload engine at work: which layer's rows are on their way, and what happens when a layer begins and ends."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from megakv.offload.cache import OffloadedCache
from megakv.offload.config import OffloadConfig
from megakv.offload.host_rank import HostPart, HostRank, Queries
from megakv.offload.link import Link, Ticket
from megakv.offload.planner import Planner
from megakv.offload.pool import PagePool
from megakv.offload.profiler import OffloadCosts
from megakv.offload.record import StepRecord
from megakv.offload.staging import StagedLayer, StagingBuffer, bring
from megakv.offload.store import TieredStore

if TYPE_CHECKING:
    from megakv.attention.method import AttentionCall
    from megakv.injection.recomputation import Recomputation
    from megakv.runtime import Runtime
    from megakv.sharding import Layout, TokenBlock

BUFFERS = 2
OUTGOING = 4
"""Transfers back to the host that may be under way: each holds its rows on the accelerator."""


class Offloader:
    """One engine's offloaded keys and values.

    Parameters
    ----------
    config : OffloadConfig
    runtime : Runtime
        Of the engine, for the pass under way.
    layers : int
        Attention layers.
    link : Link
    pool : PagePool
    device : torch.device
    """

    def __init__(
        self, config: OffloadConfig, runtime: Runtime, *, layers: int, link: Link, pool: PagePool, device: torch.device
    ):
        self.config = config
        self.link = link
        self.pool = pool
        self.device = device
        self.costs = OffloadCosts(config, link, pool, device)
        self.steps: list[StepRecord] = []
        self._recomputation: Recomputation | None = None
        self._recomputes = False
        self._runtime = runtime
        self._layers = layers
        self._cache: OffloadedCache | None = None
        self._layout: Layout | None = None
        self._free = [StagingBuffer(device) for _ in range(BUFFERS)]
        self._staged: dict[int, StagedLayer] = {}
        self._outgoing: deque[Ticket] = deque()
        self._current: int | None = None
        self._decoding = False
        self._announced: int | None = None
        self._ahead = True
        self._record: StepRecord | None = None
        self._ended = 0.0
        # Only alone: on a ring, keys and values, or queries, of other ranks would have to come to this host as well.
        hosts = config.method in ("auto", "cpu_rank") and runtime.comm.mesh.cp_size == 1
        self._host_rank = HostRank(config.cpu_threads) if hosts else None
        self._planner = Planner(
            config,
            self.costs,
            layers=layers,
            host_rank=self._host_rank,
            explore=runtime.comm.mesh.world_size == 1,
        )
        self._host_part: HostPart | None = None

    def attach(self, recomputation: Recomputation, *, recomputes: bool) -> None:
        """Take the hooks that call `enter`; `recomputes` says whether activations are kept."""
        self._recomputation, self._recomputes = recomputation, recomputes
        self._planner.recomputation = recomputation

    def close(self) -> None:
        """End all transfers and give the tiers back."""
        self._drop_all()
        if self._recomputation is not None:
            self._recomputation.remove()
        if self._host_rank is not None:
            self._host_rank.close()
        self.link.close()
        self.pool.close()

    def new_cache(self, layers: int) -> OffloadedCache:
        """An empty cache of the engine."""
        mesh = self._runtime.comm.mesh
        return OffloadedCache(layers, size=mesh.cp_size, rank=mesh.cp_rank, offloader=self)

    def new_run(self, new_tokens: int) -> None:
        """A generation begins that may add so many tokens to each sequence."""
        self.steps.clear()
        self._announced = new_tokens

    # A pass

    def begin(self, cache: OffloadedCache, layout: Layout) -> None:
        """A pass over a cache begins; its new tokens are in the cache's table already."""
        new = np.diff(layout.stored[cache.rank].bounds).tolist()
        if self._cache is not cache or not all(staged.valid(new) for staged in self._staged.values()):
            # What was brought ahead is of no use: beams changed places, or another session goes on.
            self._ahead = self._ahead and not self._staged
            self._drop_all()
        self._cache, self._layout, self._current = cache, layout, None
        self._decoding = all(count <= 1 for count in new)
        if self._recomputation is not None:
            self._recomputation.begin()
        self._record = self._new_record(cache, new)
        for layer in range(min(BUFFERS, self._layers)):
            self._stage(layer, new)

    def enter(self, layer: int, hidden_LE: Tensor) -> None:
        """A layer's attention begins: keep its input, and recompute what has landed."""
        cache, layout = self._cache, self._layout
        if cache is None or layout is None:
            return
        self._current = layer
        mine = layout.stored[cache.rank]
        store = cache.store(layer)
        if self._recomputes:
            self._offer(store, mine, hidden_LE)
        staged = self._staged.get(layer)
        if staged is None:
            self._drop_all()
            self._stage(layer, np.diff(mine.bounds).tolist())
            staged = self._staged.get(layer)
        if staged is not None and not staged.recomputed:
            self._recompute(layer, staged, cache)

    def leave(self, store: TieredStore) -> None:
        """A layer's attention is over: its buffer is free for the layer after the next."""
        cache, layout = self._cache, self._layout
        if cache is None or layout is None or self._current != store.layer or cache.store(store.layer) is not store:
            return
        store.flush()
        # A rank without any token yet does not know the size of its rows: it asks when it has one.
        if self._announced is not None and any(store.lengths()):
            turn = self._record is not None and self._record.cached > 0
            self._planner.check_room(store, self.pool, -(-self._announced // cache.size), later_turn=turn)
            self._announced = None
        if self._host_part is not None and self._record is not None:
            self._record.host_s += self._host_part.seconds
            self._record.waited_s += self._host_part.waited_s
        self._host_part = None
        while len(self._outgoing) > OUTGOING:
            self._outgoing.popleft().settle()
        self._release(store.layer)
        new = np.diff(layout.stored[cache.rank].bounds).tolist()
        for ahead in range(1, BUFFERS + 1):
            following = store.layer + ahead
            if following < self._layers:
                self._stage(following, new)
            elif self._decoding and self._ahead and following - self._layers <= store.layer:
                # The next step's first layers: their rows of this step are in their tiers or on the way there.
                self._stage(following - self._layers, [1] * len(new))

    def end(self, cache: OffloadedCache) -> None:
        """A pass has succeeded."""
        if cache is not self._cache:
            return
        record, self._record = self._record, None
        self._current = self._layout = None
        if record is not None:
            record.finish(self.link, self._runtime.comm.ledger)
            record.gap_s = record.begun - self._ended if self._ended else 0.0
            self._ended = record.ended
            if record.cached:
                self.steps.append(record)
                self.costs.learn(record, self._layers)
                if self._decoding:
                    self._planner.observe(record)

    def abandon(self, cache: OffloadedCache) -> None:
        """Rows of a cache are about to be cut: nothing of it may be on its way."""
        if cache is self._cache:
            self._drop_all()
            self._current = self._layout = self._record = None
            self._ended = 0.0

    # For stores

    def staged(self, store: TieredStore) -> StagedLayer | None:
        """What was brought of a store's layer for the pass under way, once the layer has begun."""
        if self._current != store.layer:
            return None
        staged = self._staged.get(store.layer)
        return staged if staged is not None and staged.store is store else None

    def await_streamed(self, staged: StagedLayer) -> None:
        """Let attention come after all rows of a layer."""
        if staged.streamed is not None:
            begun = time.perf_counter()
            staged.streamed.wait()
            staged.streamed = None
            if self._record is not None:
                self._record.waited_s += time.perf_counter() - begun

    def attend_on_host(self, store: TieredStore, call: AttentionCall) -> HostPart | None:
        """Begin to attend to the tokens of a layer that were left on the host."""
        if self._planner.queries is None:
            self._planner.queries = Queries(call.q_HLD.shape[0], call.q_HLD.shape[2], call.scoring)
        staged = self.staged(store)
        if staged is None or not any(staged.on_host):
            return None
        assert self._host_rank is not None
        self._host_part = self._host_rank.start(call, store, staged.on_host)
        return self._host_part

    def sent(self, ticket: Ticket) -> None:
        """New rows are on their way to a tier."""
        self._outgoing.append(ticket)

    def worth_keeping(self, inputs: Tensor, rows: Tensor) -> bool:
        """Whether activations ``[n, h]`` may pay beside rows ``[n, W]``: no larger ones can, on any machine."""
        return self.config.method != "auto" or inputs.shape[1] < rows.shape[1]

    @property
    def staging_bytes(self) -> int:
        """Bytes of the buffers on the accelerator."""
        return sum(b.nbytes for b in self._free) + sum(staged.buffer.nbytes for staged in self._staged.values())

    # Inside

    def _offer(self, store: TieredStore, mine: TokenBlock, hidden_LE: Tensor) -> None:
        """Hand the inputs of the tokens that this rank stores to their store."""
        kept = self._runtime.kept_rows()
        for sequence in range(mine.batch):
            run = mine.run(sequence)
            if run.stop > run.start:
                index = run if kept is None else torch.from_numpy(kept[run]).to(hidden_LE.device)
                # A copy: the model may go on to work on its own tensor in place.
                store.offer(sequence, hidden_LE[index].clone())

    def _stage(self, layer: int, new: list[int]) -> None:
        """Begin to bring a layer's rows, if there is a buffer and anything to bring."""
        cache = self._cache
        assert cache is not None
        store = cache.store(layer)
        cached = store.lengths()
        tokens = sum(cached)
        if layer in self._staged or not self._free or not tokens:
            return
        store.flush()
        plan = self._planner.plan(store)
        self._staged[layer] = bring(store, self._free.pop(), self.link, plan.division, new, chunk=plan.chunk)

    def _recompute(self, layer: int, staged: StagedLayer, cache: OffloadedCache) -> None:
        """Keys and values of the activations, chunk by chunk as they land, into their rows."""
        staged.recomputed = True
        record = self._record
        for chunk in staged.chunks:
            assert self._recomputation is not None and record is not None
            begun = time.perf_counter()
            chunk.ticket.wait()
            landed = time.perf_counter()
            positions = [
                cache.table.positions(cache.rank, piece.sequence)[piece.first : piece.first + piece.count]
                for piece in chunk.pieces
            ]
            keys, values = self._recomputation.recompute(layer, chunk.inputs, np.concatenate(positions))
            at = 0
            for piece in chunk.pieces:
                row = staged.row(piece.sequence, piece.first)
                k_rows, v_rows = staged.store.heads_of(staged.rows[row : row + piece.count])
                k_rows.copy_(keys[:, at : at + piece.count])
                v_rows.copy_(values[:, at : at + piece.count])
                at += piece.count
            record.waited_s += landed - begun
            record.recompute_s += time.perf_counter() - landed
        staged.chunks = []

    def _release(self, layer: int) -> None:
        staged = self._staged.pop(layer, None)
        if staged is not None:
            staged.settle()
            self._free.append(staged.buffer)

    def _drop_all(self) -> None:
        for layer in list(self._staged):
            self._release(layer)

    def _new_record(self, cache: OffloadedCache, new: list[int]) -> StepRecord:
        counts = cache.table.counts()[cache.rank].tolist()
        cached = sum(counts) - sum(new)
        store = cache.store(0)
        record = StepRecord(cached=cached, new=sum(new), plan=self._planner.plan(store))
        record.begin(self.link, self._runtime.comm.ledger)
        return record
