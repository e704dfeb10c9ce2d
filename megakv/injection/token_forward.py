"""A decoder layer of the Llama kind on processors, by compiled calls: of few tokens one, or two around attention.

Where each layer is one call, and the model does nothing between them, all of them are. Prompts are `PromptLayer`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megakv.attention.compiled import RowTable, RowTables
from megakv.attention.layer import LayerCalls, LayerKernel, LayerWeights, Norm
from megakv.attention.step import TokenStep
from megakv.attention.token_layer import LayerRanks, Moment, WholeLayer, WholeLayersCall
from megakv.distributed.comm import Over
from megakv.forward.pass_plan import PassPlan
from megakv.forward.runtime import Runtime
from megakv.injection.interface import attend_of, described_mask, scoring_of
from megakv.injection.layer_kind import (
    FEED_FORWARD,
    HEAD_NORMS,
    PROJECTIONS,
    LayerState,
    activation,
    agrees,
    settings,
    shown_to,
)
from megakv.injection.linear_slices import GatheredRows, KeptRows, LinearSlices, SummedColumns
from megakv.injection.linears import all_reduce_of, weight_of
from megakv.injection.prompt_layer import Blocks, PromptLayer, sum_over
from megakv.weights.products import Products

logger = logging.getLogger(__name__)

OPERATIONS = dict.fromkeys(("outputs", "feed_forward"), "linear_sum")
OPERATIONS |= {"inputs": "linear_gather", "partial": "replicated", "keys": "all_gather"}
"""What its messages are called, where a layer is one call."""


@dataclass(frozen=True)
class _Plan:
    """How a layer is computed on this rank."""

    calls: LayerCalls
    gather: GatheredRows | None
    """What makes all queries, keys and values of this rank's rows."""
    projects: bool
    """Whether the output projection is a call of its own, with a sum over ranks behind it."""
    summands: Callable[[Tensor], Tensor] | None
    """What all ranks have of the feed-forward, from this rank's part of it; None where that is all."""
    whole: WholeLayer | None
    """All of that in one call, for rows that are in this memory alone."""
    prompt: PromptLayer
    """The same for many rows, of which ranks have no slices."""


class TokenLayer:
    """In the place of the `forward` of one decoder layer; what layers of other kinds compute is as before."""

    def __init__(
        self,
        layer: Any,
        kernel: LayerKernel,
        products: Products,
        slices: LinearSlices | None,
        runtime: Runtime,
        blocks: Blocks,
        agreed: dict[Any, bool],
    ):
        self.layer, self._kernel, self._blocks, self._agreed, self._slices = layer, kernel, blocks, agreed, slices
        self._products, self._most_rows, self._runtime = products, products.whole_rows, runtime
        # Of one that is of the kind, as it is now: addresses of weights and what else is written down in plans, which
        # are kept by whether ranks have slices.
        self._attention: Any = None
        self._seen: Any = None
        self._state: LayerState | None = None
        self._plans: dict[bool, _Plan] = {}
        self.index = 0
        """Layers that come before it."""
        self.following: list[TokenLayer] = []
        """Those that are computed with it where they can be, itself first."""
        self._calls: dict[bool, WholeLayersCall | None] = {}

    @property
    def known(self) -> bool:
        """Whether the layer is of the kind."""
        return self._attention is not None

    def forget(self) -> None:
        """What it knows of others and of the layer, which knows it."""
        self.following, self._state = [], None

    def look(self) -> None:
        """See whether the layer is of the kind, and whether its weights are where they were."""
        self.following, self._calls = [self], {}
        before, channels = self._state, self._runtime.comm.channels
        state = self._state = LayerState(self.layer)
        if before is not None and state.same(before) and (self._seen is None or channels is self._seen[-1]):
            return
        kind = settings(self.layer)
        seen = None if kind is None else (kind, state.places, channels)
        if seen != self._seen:
            self._seen, self._plans = seen, {}
            self._attention = self.layer.self_attn if kind is not None and self._agrees(kind) else None

    def _agrees(self, kind: tuple[Any, ...]) -> bool:
        """Whether compiled calls give what layers of its settings do, which is tried once for all of them."""
        if kind not in self._agreed:
            plan = self._plan(slices=False)
            self._agreed[kind] = agrees(self.layer, plan.calls, plan.prompt)
            if not self._agreed[kind]:
                logger.warning("%s is PyTorch's: compiled calls give other results", type(self.layer).__name__)
        return self._agreed[kind]

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``[1, L, h]`` to the same."""
        step, embeddings, attention = self._runtime.current, kwargs.get("position_embeddings"), self._attention
        if args or attention is None or step is None or step.state.recomputing or not isinstance(embeddings, tuple):
            return type(self.layer).forward(self.layer, hidden_states, *args, **kwargs)
        if step.state.ahead is not None and self.index in step.state.ahead[1]:
            assert hidden_states is step.state.ahead[0], "something came between layers that were computed together"
            return hidden_states
        prompt = step.token_step is None
        # What layers are is looked at before such a pass, and not before shorter ones.
        short = prompt and (len(step.tokens) < self._blocks.least_rows or step.slices)
        plan = None if short else self._plan(slices=step.slices)
        if plan is None or not self._fits(plan.calls, hidden_states, embeddings, step):
            return type(self.layer).forward(self.layer, hidden_states, *args, **kwargs)
        calls, (cos, sin) = plan.calls, embeddings
        window = described_mask(attention, kwargs.get("attention_mask")).window
        one = step.prompt_step if prompt else step.token_step
        if one is not None and (out := self._at_once(step, one, hidden_states, cos, sin, window)) is not None:
            return out
        for kept in shown_to(attention):
            _, normed = calls.normed(hidden_states[0], None, calls.dtype, behind=False)
            kept.enter(attention, (), {"hidden_states": normed[None], **kwargs})
        if prompt:
            return self._prompt(step, plan, hidden_states, embeddings, window)
        found = calls.project(hidden_states, cos, sin, whole=plan.gather is None)
        if plan.gather is not None:
            found = plan.gather.gathered(found)
            calls.rotate(found, cos, sin)
        q, k, v = calls.heads(found)
        scoring = scoring_of(attention.scaling, window, None)
        attended = attend_of(attention)(attention.layer_idx, q, k, v, scoring, None)
        if plan.projects:
            attended = attention.o_proj(attended.flatten(2))
        middle, out = calls.feed_forward(hidden_states, attended, projected=plan.projects, whole=plan.summands is None)
        if plan.summands is None:
            return out
        return calls.add(middle, plan.summands(out), self.layer.mlp.down_proj.bias)

    def _prompt(self, step: PassPlan, plan: _Plan, x: Tensor, embeddings: tuple[Tensor, ...], window: Any) -> Tensor:
        """The layer for many rows; the model's last one as in `LastLayerRows`, for those alone that are wanted."""
        attention, (cos, sin) = self._attention, embeddings
        last = step.last if attention.layer_idx == self._runtime.traits.last_layer else None
        wanted = None if last is None else last.rows
        found = plan.prompt.project(x, cos, sin, wanted if last is not None and last.queries else None)
        (q, k, v), scoring = plan.calls.heads(found), scoring_of(attention.scaling, window, None)
        attended = attend_of(attention)(attention.layer_idx, q, k, v, scoring, None).flatten(2)
        sums = sum_over(attention.o_proj), sum_over(self.layer.mlp.down_proj)
        if wanted is None:
            return plan.prompt.outputs(x, attended, sums)
        some = plan.prompt.outputs(x[:, wanted], attended[:, wanted], sums)
        return torch.zeros_like(x).index_copy_(1, wanted, some)

    def _plan(self, *, slices: bool) -> _Plan:
        if (plan := self._plans.get(slices)) is None:
            plan = self._plans[slices] = self._made(self._slices if slices else None)
        return plan

    def _at_once(
        self, step: PassPlan, one: TokenStep, x: Tensor, cos: Tensor, sin: Tensor, window: int | None
    ) -> Tensor | None:
        """The layer in one call, with those that follow; None, with nothing done, where rows lie elsewhere too."""
        comm, spread = self._runtime.comm, one.spread(window)
        if step.slices not in self._calls:
            self._calls[step.slices] = self._call(slices=step.slices)
        call = self._calls[step.slices]
        if call is None or x.shape[-2] != one.length or not (spread is None or call.sends(spread.rows)):
            return None
        layers, tables = [own._attention.layer_idx for own in self.following[: len(call.layers)]], None
        if call.like is not None and layers == list(range(len(step.cache))):
            tables = one.places(step.cache, call.like)
        if tables is None and (tables := self._each(step, one, layers, call)) is None:
            return None
        begun, where = comm.ledger.mark(), layers[0] if len(tables) == 1 else None
        ends, name = layers[len(tables) - 1] == self._runtime.traits.last_layer, "all_gather" if spread else "decoding"
        picked = step.last.rows if ends and (spread is not None or step.layout.size == 1) else None
        with comm.watch.guard(call.ranks, name, where) if call.ranks else nullcontext():
            out, moments = call(x, cos, sin, one, tables, window, picked)
        step.state.ahead = out, range(self.index + 1, self.index + len(tables))
        for layer, parts in zip(layers, moments, strict=False):
            self._count(layer, begun, parts)
            self._runtime.stepped(step, layer, window)
        return out

    @staticmethod
    def _each(step: PassPlan, one: TokenStep, layers: list[int], call: WholeLayersCall) -> RowTables | None:
        """Where the rows of those layers lie, or of the first ones whose rows are in this memory alone, if any."""
        tables = list[RowTable]()
        for layer, whole in zip(layers, call.layers, strict=True):
            if (table := one.rows(step.cache.store(layer), whole.like, whole.like)) is None:
                break
            tables.append(table)
        return RowTables.of(tables) if tables else None

    def _call(self, *, slices: bool) -> WholeLayersCall | None:
        """That of this layer and of as many of the following ones as it is for."""
        found = list[WholeLayer]()
        for own in self.following:
            whole = own._plan(slices=slices).whole if own.known else None
            if whole is None or not whole.few or not (found or [whole])[0].fits(whole):
                break
            found.append(whole)
        return WholeLayersCall(found) if found else None

    def _count(self, layer: int, begun: float, parts: list[Moment]) -> None:
        ledger = self._runtime.comm.ledger
        for part, sent, first, last in parts:
            first, last = begun + first, begun + last
            ledger.leave_dense(first)
            if part in OPERATIONS:
                ledger.sent(OPERATIONS[part], layer, sent)
                ledger.transfer(OPERATIONS[part], layer, first, first, last)
            else:
                ledger.computed_since(first, part, layer, last)
            ledger.enter_dense(last)

    def _fits(self, calls: LayerCalls, x: Tensor, embeddings: tuple[Tensor, ...], step: PassPlan) -> bool:
        if (
            type(x) is not Tensor
            or x.dtype != calls.dtype
            or not x.is_contiguous()
            or torch.is_grad_enabled()
            or torch.is_autocast_enabled("cpu")
        ):
            return False
        rows, dim = x.shape[-2], calls.weights.head_dim
        if x.device.type != "cpu" or (step.token_step is not None and rows > self._most_rows):
            return False
        # All layers of a pass are given the same ones, which are held until its end: nothing else is where they are.
        key, kind = ("embeddings", id(embeddings), dim), (1, rows, dim)
        fits = (part.shape == kind and part.dtype == x.dtype and part.is_contiguous() for part in embeddings)
        return step.once(key, lambda: (embeddings, len(embeddings) == 2 and all(fits)))[1]

    def _made(self, slices: LinearSlices | None) -> _Plan:
        attention, feed_forward = self.layer.self_attn, self.layer.mlp
        fields = dict[str, Any]()
        gather: GatheredRows | None = None
        for name in (*PROJECTIONS, *FEED_FORWARD):
            linear = getattr(attention if name in PROJECTIONS else feed_forward, name)
            part = None if slices is None else slices.part(linear)
            # Whatever becomes of the parameter, this memory stays.
            weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
            if isinstance(part, GatheredRows):
                gather, own = part, part.own.get(id(linear))
                found = weight_of(linear, weight[:0], None) if own is None else own.part()
            elif isinstance(part, KeptRows):
                (own,) = part.own
                found = own.part()
            elif isinstance(part, SummedColumns):
                found = part.own.part()
            else:
                found = weight_of(linear, weight, bias if all_reduce_of(linear) is None else None)
            fields[name.removesuffix("_proj")] = found
        fields |= {name: Norm.of(getattr(attention, name)) for name in HEAD_NORMS if hasattr(attention, name)}
        dim = attention.head_dim
        weights = LayerWeights(
            heads=attention.q_proj.weight.shape[0] // dim,
            kv_heads=attention.k_proj.weight.shape[0] // dim,
            head_dim=dim,
            activation=activation(feed_forward.act_fn) or 0,
            pairs=self._products.pairs,
            input_norm=Norm.of(self.layer.input_layernorm),
            output_norm=Norm.of(self.layer.post_attention_layernorm),
            **fields,
        )
        calls, down = LayerCalls(self._kernel, weights), feed_forward.down_proj
        o_part, down_part = (None if slices is None else slices.part(linear) for linear in (attention.o_proj, down))
        summands = down_part.summands if isinstance(down_part, SummedColumns) else None
        if summands is None and (all_reduce := all_reduce_of(down)) is not None:
            summands = lambda own: all_reduce(own)[None]  # noqa: E731
        projects = o_part is not None or all_reduce_of(attention.o_proj) is not None
        prompt = PromptLayer(calls, self._blocks, self._products)
        return _Plan(calls, gather, projects, summands, self._whole(calls, gather, o_part, down_part), prompt)

    def _whole(self, calls: LayerCalls, gather: Any, o_part: Any, down_part: Any) -> WholeLayer | None:
        """All of the layer in one call, given what ranks have of it; None where they have no channel for that.

        Nor where linears are summed over tensor-parallel ranks alone, which is another way: of the ranks that meet in a
        layer, some may compute it in one call and others not.
        """
        mesh, channels = self._runtime.comm.mesh, self._runtime.comm.channels
        o, down = self.layer.self_attn.o_proj, self.layer.mlp.down_proj
        over: dict[str, Over | None] = {
            "inputs": None if gather is None else "cp",
            "partial": "cp" if mesh.cp_size > 1 else None,
        }
        for name, linear, part in (("outputs", o, o_part), ("feed_forward", down, down_part)):
            spread: Over | None = None if all_reduce_of(linear) is None else "tp"
            over[name] = spread if part is None else part.over
        if "tp" in over.values() or not all(group is None or group in channels for group in over.values()):
            return None
        ranks = LayerRanks(
            **{name: None if group is None else channels[group] for name, group in over.items()},
            widths=() if gather is None else gather.widths,
            columns=(0, 0) if o_part is None else o_part.columns,
            outputs_bias=None if o.bias is None else o.bias.detach(),
            feed_forward_bias=None if down.bias is None else down.bias.detach(),
        )
        return WholeLayer(calls, ranks, self.layer.self_attn.scaling)
