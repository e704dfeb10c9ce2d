"""What hangs on an engine: its mesh, its methods, and the forward pass that is under way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from megakv.attention.device_step import LayerKind
from megakv.attention.reference import Scoring
from megakv.attention.runahead import Runahead
from megakv.attention.step import load_step, token_step
from megakv.base.device import upload
from megakv.cache.cache import ShardedCache
from megakv.cache.dense import GROWTH_MINIMUM, DenseStore
from megakv.cache.shared_heads import SharedHeadsStore
from megakv.cache.store import TurnStore
from megakv.costmodel.context_parallel import Workload
from megakv.distributed.sharding import IntArray, Layout, TokenBlock
from megakv.fairkv.compression_plan import CompressionPlan
from megakv.fairkv.observation import Turn
from megakv.forward.attend import LayerAttention
from megakv.forward.pass_plan import Generation, LastRows, PassPlan, PassState, Wanted
from megakv.forward.planning import ModelTraits


@dataclass
class Runtime(LayerAttention):
    """The attention of an engine, and the forward pass that is under way."""

    dtype: torch.dtype = torch.float32
    """In which attention is computed and cached where its inputs are not of one type, or autocast would make them of
    another: the model's.
    """
    current: PassPlan | None = None
    """The pass under way."""
    generation: Generation | None = None
    """The `generate` call under way."""
    rotate: Callable[[int, Tensor, int], Tensor] | None = None
    """Moves a layer's keys ``[n, D]`` on by so many positions."""
    _life: int = 0
    _kernel: bool | None = None

    def __post_init__(self) -> None:
        self._forget()

    @property
    def traits(self) -> ModelTraits:
        """Properties of the model."""
        return self.planner.traits

    def _forget(self) -> None:
        """Begin with methods that expect nothing of an earlier pass."""
        self._life = self.comm.watch.failures.life
        self.methods.clear()
        self.methods["runahead"] = Runahead(self.planner.runahead.chunk_tokens)

    def new_cache(self, layers: int) -> ShardedCache:
        """An empty cache in the memory of the model's device."""
        mesh, compresses = self.comm.mesh, self.compressor is not None
        # Beside what heads keep, which may be little, unused capacity counts.
        least_growth = 2 if compresses else GROWTH_MINIMUM

        def new_store(layer: int, prompts: IntArray) -> TurnStore:
            dense = partial(DenseStore, least_growth=least_growth)
            shares = None if self.replicas is None else self.replicas.shares(layer)
            return dense(len(prompts)) if shares is None else SharedHeadsStore(prompts, shares, dense)

        return ShardedCache(
            layers,
            size=mesh.cp_size,
            rank=mesh.cp_rank,
            new_store=new_store,
            compresses=compresses,
            shares_heads=self.replicas is not None,
            rotate=self.rotate,
        )

    def plan(
        self,
        new: TokenBlock,
        cache: ShardedCache,
        slots: int,
        wanted: Wanted,
        *,
        use_cache: bool = True,
        return_dict: bool = True,
        longest: int = 0,
    ) -> PassPlan:
        """Decide how a pass over new tokens is computed, and whether its keys and values are compressed.

        Rotary frequencies that follow the length go by the `longest` one, where that is more than the pass's own.
        """
        if self._life != self.comm.watch.failures.life:
            # What was under way in a pass that failed went with its groups.
            self._forget()
            self.planner.forget()
        lengths, size = np.diff(new.bounds), self.comm.mesh.cp_size
        proposed = 0 if self.generation is None else self.generation.proposed
        self.comm.ledger.decoding = proposed > 0 or int(lengths.max(initial=0)) <= 1
        turn, compress, ends = self._turn(lengths, cache, slots)
        evict: tuple[int, ...] = ()
        watched = False
        if (eviction := self.eviction) is not None and cache.compresses:
            full, watched = eviction.plan(cache, lengths, turn, compress)
            evict = full if ends else ()
        workload, plain = None, False
        method: str | None = "local"
        if not len(new):
            # There is nothing to attend to; a stand-in row on every rank goes through the layers. What came of a turn
            # that goes on stays whole, windows or not: it may be compressed when it ends.
            layout, compression = Layout((new,) * size, (new,) * size), CompressionPlan(None if ends else turn)
        else:
            held = cache.table.counts().sum(0) if cache.length else np.zeros_like(lengths)
            workload = Workload(tuple(lengths.tolist()), tuple(held.tolist()), size)
            layout, method = self.planner.plan(new, cache, workload, proposed)
            compression = CompressionPlan(turn, compress, evict, watched)
            idle = self.compressor is None or compression.idle
            plain = self.replicas is None and idle
            # Where all rows go through layers at once, leaving some out would take longer than to compute them.
            steps = plain and len(new) <= self.traits.few_rows and (size == 1 or layout.replicated)
            if not (steps or compression.scored or self.planner.decodes(workload, proposed)):
                layout = self._narrowed(layout, new, wanted)
        layout = replace(layout, longest=longest) if longest else layout
        last, state = self._last_rows(layout, wanted)
        one = None
        if plain and self._steps():
            one = token_step(layout, cache, self.comm, self.traits.few_rows, pairs=self.traits.pairs)
        prompt = None
        if one is None and plain and method == "all_gather" and workload is not None and self._steps():
            if workload.total <= self.traits.spread_rows:
                from megakv.attention.spread import spread_step

                prompt = spread_step(layout, cache, self.comm, pairs=self.traits.pairs)
        return PassPlan(
            token_step=one,
            prompt_step=prompt,
            layout=layout,
            cache=cache,
            method=method,
            slots=slots,
            rank=self.comm.mesh.cp_rank,
            wanted=wanted,
            workload=workload,
            proposed=proposed,
            last=last,
            compression=compression,
            generation=self.generation,
            use_cache=use_cache,
            return_dict=return_dict,
            state=state,
        )

    def _narrowed(self, layout: Layout, new: TokenBlock, wanted: Wanted) -> Layout:
        """A layout whose last layer does with the tokens whose results are asked for.

        It does where there is one of each sequence, as when text is generated, unless something may be compressed,
        which takes all queries.
        """
        asked = wanted.tokens(new.batch)
        fewer = self.traits.last_layer is not None and 0 < len(asked) < len(new)
        return layout.narrowed(asked) if fewer and np.diff(asked.bounds).max() <= 1 else layout

    def _last_rows(self, layout: Layout, wanted: Wanted) -> tuple[LastRows, PassState]:
        """The packed rows of this rank whose logits are wanted, and the state of a pass that knows them.

        A stand-in row keeps tensors non-empty, and carries the longest position to rotary embeddings that need it.
        """
        rank = self.comm.mesh.cp_rank
        tokens = layout.tokens[rank]
        longest = self.traits.length_dependent and len(tokens) and tokens.position.max() < layout.max_position
        found = wanted.among(tokens)
        local = found[1]
        length = len(tokens) + bool(len(tokens) == 0 or longest)
        rows = None
        if len(local) < length:
            rows = upload(local if len(local) else np.zeros(1, dtype=np.int64), self.comm.mesh.device)
        return LastRows(rows, length, layout.wanted is not None), PassState(made={PassPlan.wanted_key(rank): found})

    def _steps(self) -> bool:
        """Whether every rank has the kernel of `TokenStep`: they exchange what it finds."""
        if self._kernel is None:
            self._kernel = load_step()[0] is not None
            if self.comm.mesh.world_size > 1:
                self._kernel = all(self.comm.gather_objects(self._kernel))
        return self._kernel

    def _turn(self, lengths: IntArray, cache: ShardedCache, slots: int) -> tuple[Turn | None, tuple[int, ...], bool]:
        """The turn that a pass belongs to, if some of it may be compressed, the sequences that are with this pass, and
        whether it ends.

        A pass that is no part of a `generate` call's prompt is a turn of its own.
        """
        proposed = self.generation is not None and self.generation.proposed
        if self.compressor is None or not cache.compresses or proposed:
            # Candidates behind a prompt are no prompt.
            return None, (), True
        prompt = None if self.generation is None else self.generation.prompt
        turn = Turn(cache.length, slots) if prompt is None or slots > prompt.stop else prompt
        self.compressor.check(turn)
        if slots < turn.stop:
            possible = self.compressor.rows(np.array([turn.stop - turn.first]))
            return turn if possible else None, (), False
        rows = self.compressor.rows(lengths + cache.table.since(turn.first) if cache.length else lengths)
        # Pieces of it may have been observed, though nothing is compressed after all.
        told = self.compressor.interval is not None and turn.seen
        return turn if rows or told else None, rows, True

    def attend(
        self, layer: int, q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, scoring: Scoring, sinks: Tensor | None
    ) -> Tensor:
        """Store the new keys and values, then attend over all ranks, in one type.

        Under autocast a model hands over what its operators happen to return, in one turn of a session and perhaps not
        in the next: messages, caches and merges are all in the model's type, which loses nothing.

        Shapes are as in `attend_layer`.
        """
        kind, step = q_BHSD.device.type, self.current
        assert step is not None, "attention outside a forward pass"
        if step.state.device_step is not None:
            return step.state.device_step.attend(layer, q_BHSD, k_BKSD, v_BKSD, scoring, sinks)
        if step.state.kinds is not None:
            step.state.kinds[layer] = LayerKind.of(q_BHSD, k_BKSD, v_BKSD, scoring)
        if (one := step.token_step) is not None and one.computes(q_BHSD, k_BKSD, v_BKSD, scoring):
            table = one.rows(step.cache.store(layer), k_BKSD[0], v_BKSD[0])
            if table is not None:
                out = one.attend(layer, table, q_BHSD, k_BKSD, v_BKSD, scoring, sinks)
                self.stepped(step, layer, scoring.window)
                self.comm.ledger.enter_dense()
                return out
        if not torch.is_autocast_enabled(kind) and q_BHSD.dtype == k_BKSD.dtype == v_BKSD.dtype:
            out = self.attend_layer(step, layer, q_BHSD, k_BKSD, v_BKSD, scoring, sinks)
        else:
            with torch.autocast(kind, enabled=False):
                q, k, v = (tensor.to(self.dtype) for tensor in (q_BHSD, k_BKSD, v_BKSD))
                out = self.attend_layer(step, layer, q, k, v, scoring, sinks).to(q_BHSD.dtype)
        return out

    def stepped(self, step: PassPlan, layer: int, window: int | None, method: str | None = None) -> None:
        """A layer has stored the new rows of a step of decoding, and attended to all; by that method, or the pass's."""
        step.cache.windows[layer] = window
        step.cache.attended(layer, step.slots)
        self.comm.ledger.attended(method or str(step.method))
