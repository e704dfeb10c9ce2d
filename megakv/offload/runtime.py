"""The offload engine at work: which layer's rows are on their way, and what happens when a layer begins and ends."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from megakv.attention.method import AttentionCall
from megakv.cache.cache import ShardedCache
from megakv.costmodel.hardware import HostProfile
from megakv.distributed.agreement import Agreement
from megakv.distributed.sharding import Layout, TokenBlock, TokenTable
from megakv.forward.pass_plan import PassPlan
from megakv.forward.runtime import Runtime
from megakv.injection.recomputation import Recomputation
from megakv.offload.cache import OffloadedCache, group_call
from megakv.offload.config import GIB, OffloadConfig
from megakv.offload.cuda_link import make_link
from megakv.offload.host_attention import attend_on_host
from megakv.offload.host_rank import HostParts, HostRank
from megakv.offload.layer_columns import LayerColumns
from megakv.offload.pages import PagePool, made_tiers
from megakv.offload.planner import Planner
from megakv.offload.prefetch import Prefetch
from megakv.offload.profile import Profiler
from megakv.offload.rates import Rates
from megakv.offload.record import StepLog, StepRecord
from megakv.offload.residents import ResidentBudget
from megakv.offload.room import check_room
from megakv.offload.schedule import GroupSchedule
from megakv.offload.store import Strip, TieredStore
from megakv.offload.weight_stream import WeightStream
from megakv.offload.weights import LayerWeights


class Offloader:
    """One engine's offloaded keys and values, and its decoder layers' weights where they come over the link too.

    `weights` have taken their part of a budget; `recomputes` says whether activations are kept.
    """

    def __init__(
        self,
        config: OffloadConfig,
        runtime: Runtime,
        model: PreTrainedModel,
        *,
        layers: int,
        recomputes: bool,
        weights: LayerWeights | None = None,
    ):
        comm = runtime.comm
        self.config, self.device = config, comm.mesh.device
        self._recomputes, self._runtime, self._layers = recomputes, runtime, layers
        self._cache: OffloadedCache | None = None
        self._layout: Layout | None = None
        # Of the pass under way, without what was compressed before.
        self._table = TokenTable(0, 0)
        self._decoding, self._keeps = False, True
        self._announced: tuple[int, int] | None = None
        self._profile: HostProfile | None = None
        self._host_rank: HostRank | None = None
        self.weights: WeightStream | None = None
        self.schedule = GroupSchedule(config, model, Agreement(comm))

        with ExitStack() as made:
            tiers = made_tiers(config, weights, pin=self.device.type == "cuda", made=made)
            self.pool = PagePool(tiers, config.page_kib << 10, layers=layers)
            self._disk = self.pool.disk or (None if weights is None else weights.disk)
            self.link = made.enter_context(closing(make_link(self.device, config.emulated_link_gb_s)))
            if config.host_attends:
                self._host_rank = made.enter_context(closing(HostRank(config.cpu_threads, self.link.clock)))
            self._recomputation = Recomputation(
                model, entered=self.enter, current=lambda: cast(PassPlan, runtime.current)
            )
            made.callback(self._recomputation.remove)
            if weights is not None:
                stream = WeightStream(model, weights, link=self.link, device=self.device, groups=self.schedule.count)
                self.weights = made.enter_context(closing(stream))
            if config.groups > 1 or config.chooses_groups:
                # Behind the hooks of the weights: those are there when a layer's first group is computed.
                made.callback(LayerColumns(model, runtime, lambda: self._prefetch.groups).remove)
            self.residents = ResidentBudget(int(config.device_gb * GIB), layers)
            self.rates = Rates(Profiler(config, self.link, self._disk, self.device, sharers=comm.watch.neighbours))
            # A last rank that keeps everything waits for nobody, unless its heads are on several.
            alone = comm.mesh.tp_size == 1 and (comm.mesh.cp_size == 1 or runtime.planner.gathers)
            self._planner = Planner(
                config,
                self.rates,
                chunk=config.chunk_on(self.device.type),
                layers=layers,
                recomputation=self._recomputation,
                host_rank=self._host_rank,
                leads=None if alone else comm.mesh.rank == 0,
                weights=self.weights,
            )
            self._log = StepLog(self.link, comm.ledger, self._planner.observe)
            self._prefetch = Prefetch(self._planner, self.link, layers=layers, device=self.device)
            made.callback(self._prefetch.drop_all)
            self._made = made.pop_all()

    def close(self) -> None:
        """End all transfers and give the tiers back."""
        self._made.close()

    def new_cache(self, layers: int) -> OffloadedCache:
        """An empty cache of the engine."""
        runtime, mesh = self._runtime, self._runtime.comm.mesh
        compresses, replicas, rotate = runtime.compressor is not None, runtime.replicas, runtime.rotate
        made = partial(OffloadedCache, layers, size=mesh.cp_size, rank=mesh.cp_rank, engine=self, replicas=replicas)
        return made(compresses=compresses, rotate=rotate)

    def room(self, cache: ShardedCache, sequences: int) -> int:
        """For how many tokens of so many sequences there is room, on a rank that has some of a cache.

        Every sequence may fill its last page of every layer with a single token.
        """
        assert isinstance(cache, OffloadedCache)
        strips = (strip for layer in range(self._layers) for strip in cache.strips(layer))
        columns = [rows for strip in strips for rows in strip.store.rows_per_page]
        pages = self.pool.capacity - sequences * len(columns)
        return max(0, int(pages / sum(1 / rows for rows in columns))) if columns else sys.maxsize

    def new_run(self, new_tokens: int, prompt: int) -> Planner:
        """A generation begins that may add so many tokens to each row of a prompt; returns what its ranks agree on."""
        self._announced = prompt, new_tokens
        self.schedule.new_run()
        self._start_anew()
        return self._planner

    def take_up(self, cache: ShardedCache) -> None:
        """A pass of one of several generations comes, each in a cache of its own."""
        if cache is not self._cache:
            self._start_anew()

    def _start_anew(self) -> None:
        self._log.clear()
        # What was brought for a step that did not come is of no use.
        self._prefetch.drop_all()
        self._planner.new_run()

    # A pass

    def begin(self, cache: OffloadedCache, layout: Layout, *, stays: bool, turn: bool) -> None:
        """A pass over a cache begins, its new tokens in the table; `stays` and `turn` as for `ShardedCache.begin`."""
        self._log.read()
        self._profile = self.rates.profile
        self._table = cache.uncompressed()
        entered = partial(self._prefetch.enter, cache, self._table, layout, stays=stays, turn=turn)
        if not entered(groups=self.schedule.count):
            # Beams have changed places, say.
            self._planner.ahead = False
        new = np.diff(layout.stored[cache.rank].bounds).tolist()
        if self.schedule.choose(cache, layout, buffers=self._prefetch.nbytes):
            entered(groups=self.schedule.count)
        self._cache, self._layout = cache, layout
        self._decoding = all(count <= 1 for count in new)
        cached, plan = sum(cache.tier(0).lengths()), self._prefetch.plan(cache.tier(0))
        # The plan of the next step may find that they are of no use: all layers keep the same tokens' activations.
        self._keeps = not turn and (self._planner.wants_inputs or not self._decoding)
        if self.pool.disk is not None and not (self._decoding or cached or turn):
            # What has no room in memory lies on disk, where the host cannot attend to it.
            to_come = self._announced[1] if self._announced else 0
            memory = self.pool.free_bytes(self.pool.tiers[0]) / self._layers
            self._keeps = self._planner.keeps_inputs(cache.tier(0), [count + to_come for count in new], memory)
        # Where nothing can be brought ahead, each step is like the others all the same, unless it evicts.
        ready = (len(self._prefetch) > 0 or not self._planner.ahead) and not self._evicts
        self._log.begin(cached=cached, new=sum(new), plan=plan, kv_bits=self.config.kv_bits, ready=ready)
        if self.weights is not None:
            self.weights.begin(self.schedule.count, spread=len(self._prefetch.groups) > 1)
        self._prefetch.begin()

    def enter(self, layer: int, hidden_LE: Tensor) -> None:
        """A layer's attention begins, of all sequences or of a group: keep its input, and recompute what has landed."""
        cache, step = self._cache, self._runtime.current
        if cache is None or self._layout is None or step is None:
            return
        store, index = cache.tier(layer), step.part or 0
        for strip in cache.strips(layer):
            if index:
                strip.store.pause()
            else:
                strip.store.enter()
        if index:
            self._pass_on(store, index - 1)
        if self._recomputes and self._keeps and store.keeps_inputs:
            inputs = self._recomputation.inputs(layer, hidden_LE)
            store.offer(step.layout.stored[cache.rank], inputs, step.layout.kept_rows(cache.rank))
        self._prepare(store, index)

    def columns(self, cache: OffloadedCache, call: AttentionCall) -> Iterator[AttentionCall]:
        """A layer's attention, group by group; the next group's rows are on their way meanwhile."""
        self._prefetch.windows[call.layer] = call.scoring.window
        if call.layout.gathered:
            # The last rank alone takes what it collects, but whether that has room all must know.
            cache.set_format(call.layer, call.k_KLD, call.v_KLD)
            self.expect(cache.tier(call.layer))
        if cache is not self._cache or len(self._prefetch.groups) == 1:
            yield call
            return
        step, groups = self._runtime.current, self._prefetch.groups
        if step is not None and step.part is not None:
            # The layer itself goes group by group.
            yield replace(call, table=call.table.only(groups[step.part]))
            return
        store = cache.tier(call.layer)
        for index, group in enumerate(groups):
            if index:
                self._pass_on(store, index - 1)
                self._prepare(store, index)
                for strip in cache.strips(call.layer):
                    strip.store.put_new()
            yield group_call(call, group)

    def expect(self, store: TieredStore) -> None:
        """A layer's first rows of a generation come: refuse it if not all that will be held has room."""
        cache, layout = self._cache, self._layout
        if self._announced is None or cache is None or layout is None or cache.tier(store.layer) is not store:
            return
        announced, self._announced = self._announced, None
        check_room(self.pool, cache, layout, store, self._prefetch.windows, self._runtime, *announced)

    def leave(self, store: TieredStore) -> None:
        """A layer's attention is over: its buffer is free for another one. Of several tiers the last one says so."""
        if self._cache is not None and self._cache.tier(store.layer) is not store:
            return
        if self.weights is not None:
            self.weights.attended()
        self._pass_on(store, len(self._prefetch.groups) - 1)

    def end(self, cache: OffloadedCache) -> None:
        """A pass has succeeded."""
        if cache is not self._cache:
            return
        self._layout = None
        rates, profiled = self.rates, self.rates.profile is not self._profile
        seconds = rates["byte_s"], rates["disk_byte_s"]
        self._log.end(self.weights, decoding=self._decoding, profiled=profiled, byte_seconds=seconds)

    def abandon(self, cache: OffloadedCache) -> None:
        """Rows of a cache are about to be cut: nothing of it may be on its way."""
        if cache is self._cache:
            self._prefetch.drop_all()
            self._layout = None
            self._log.abandon()

    @property
    def steps(self) -> list[StepRecord]:
        """What the passes over cached tokens of the latest generation did."""
        return self._log.steps

    def attend_on_host(
        self, strips: Sequence[Strip], call: AttentionCall, q_HLD: Tensor, tokens: TokenBlock
    ) -> HostParts | None:
        """Begin to attend from queries of whichever rank to the tokens of a layer that were left on the host."""
        if self._host_rank is None or self._cache is None:
            return None
        return attend_on_host(self._host_rank, call, self._cache, self._table, q_HLD, tokens, strips)

    @property
    def disk_io(self) -> str | None:
        """How the disk is read, where keys and values or weights lie on one."""
        return None if self._disk is None else "files"

    @property
    def staging_bytes(self) -> int:
        """Bytes of the buffers on the accelerator, and of what stays there."""
        return sum(self.residents.used) + self._prefetch.nbytes + (0 if self.weights is None else self.weights.nbytes)

    # Inside

    @property
    def _evicts(self) -> bool:
        """Whether the pass under way compresses sequences again."""
        step = self._runtime.current
        return step is not None and bool(step.compression.evict)

    def _prepare(self, store: TieredStore, index: int) -> None:
        """A group of a layer comes next: recompute what has landed of it."""
        cache = self._cache
        assert cache is not None
        staged = self._prefetch.ensure(store.layer, index)
        strips = cache.strips(store.layer)
        brought = [None] * len(strips) if staged is None else [staged, *staged.shared]
        for strip, own in zip(strips, brought, strict=True):
            strip.store.staged = own
            if own is not None:
                own.record = self._log.current
        if staged is not None:
            staged.recompute(store.layer, self._table, cache.rank, self._recomputation)

    def _pass_on(self, store: TieredStore, index: int) -> None:
        """A group of a layer was attended to: its buffer is free for the group after the next."""
        record, cache, staged = self._log.current, self._cache, store.staged
        assert record is not None and cache is not None
        self.link.hold_up()
        for strip in cache.strips(store.layer):
            if strip.store.staged is not None:
                strip.store.move_residents(strip.store.staged)
                strip.store.staged = None
        record.attended(store.layer, *(([], {}) if staged is None else (staged.host_parts, staged.counts())))
        # A layer that has yet to evict is not what the next step needs.
        beyond = self._decoding and self._planner.ahead and not self._evicts
        self._prefetch.follow(store.layer, index, beyond=beyond)
        if self.weights is not None:
            self.weights.next_piece()
