"""Hooks on an unmodified model: shard what goes in, share what comes out."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from megakv.base.device import upload
from megakv.cache.cache import ShardedCache
from megakv.distributed.agreement import Agreement
from megakv.distributed.sharding import IntArray, new_tokens
from megakv.forward.last_layer import LastLayerRows
from megakv.forward.pass_plan import LONGEST, LastRows, PassPlan, Wanted
from megakv.forward.planning import ModelTraits
from megakv.forward.runtime import Runtime
from megakv.injection.linear_slices import LinearSlices
from megakv.injection.linears import FewRowsLinears
from megakv.injection.policy import Positions, depends_on_length
from megakv.injection.step import StepKernel, TokenLayers
from megakv.injection.step_graphs import step_graphs
from megakv.weights.products import SLICED_ROWS, Products, multiplies_pairs

REFUSED_INPUTS = {
    "labels": "MegaKV is for inference; compute the loss from the logits",
    "output_attentions": "attention weights are never materialised",
    "output_hidden_states": "hidden states stay on the rank that computed them",
    "token_type_ids": "only plain causal text models are supported",
    **dict.fromkeys(
        ("pixel_values", "pixel_values_videos", "input_features", "image_embeds"), "MegaKV reads text alone"
    ),
}


class ForwardHooks:
    """The pre-forward and forward hooks of one model; `new_cache` makes an empty cache of it on this mesh.

    `here` says whether its weights stay where they are, of which context-parallel ranks may decode with slices;
    `in_memory` whether caches lie in the device's memory alone; `graphs` whether steps of decoding may be captured;
    `traits` are what was found of the model, for its runtime.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        runtime: Runtime,
        new_cache: Callable[[], ShardedCache],
        *,
        here: bool = True,
        in_memory: bool = True,
        graphs: bool = True,
    ):
        self._runtime, self.new_cache = runtime, new_cache
        self._signature = inspect.signature(type(model).forward)
        self._keeps_logits = "logits_to_keep" in self._signature.parameters
        self._positions = Positions(model)
        length_dependent = depends_on_length(model)
        self._last_layer = LastLayerRows(model, lambda: _last_rows(runtime))
        products = Products()
        if runtime.comm.mesh.device.type == "cpu":
            products = Agreement(runtime.comm).decide(lambda: Products.measured(model.dtype))
            # A processor without them would compute other numbers from the same call.
            everywhere = runtime.comm.gather_objects(multiplies_pairs(model.dtype))
            products = replace(products, pairs=products.pairs and all(everywhere))
        self.products, self._linears = products, FewRowsLinears(model, products)
        self._slices: LinearSlices | None = None
        if here and runtime.planner.may_slice:
            self._slices = LinearSlices(
                model, self._linears, runtime.comm, current=lambda: runtime.current, pays=runtime.planner.slice_pays
            )
        self._layers = TokenLayers(model, products, self._slices, runtime, here=here)
        # What follows lengths or positions in Python alone would stay what it was.
        graphs = graphs and self._positions.taken and not length_dependent
        captured = step_graphs(model, runtime, capture=graphs) if in_memory else None
        self._kernels: list[StepKernel] = [self._layers, *([] if captured is None else [captured])]
        # A turn that may be compressed is not computed in slices.
        whole_rows = products.whole_rows if self._layers.at_once() else products.most_rows
        meets = in_memory and runtime.compressor is None and self._layers.meet_in_memory()
        self.traits = ModelTraits(
            last_layer=self._last_layer.attention,
            slices=None if self._slices is None else self._slices.gains,
            length_dependent=length_dependent,
            few_rows=whole_rows if in_memory else 1,
            pairs=in_memory and products.pairs,
            sliced_rows=min(products.most_rows, SLICED_ROWS) if meets and self._slices is not None else 0,
            spread_rows=products.whole_rows * runtime.comm.mesh.cp_size if meets else 0,
        )
        self._before_handle = model.register_forward_pre_hook(self._before, with_kwargs=True)
        self._after_handle = model.register_forward_hook(self._after, with_kwargs=True, always_call=True)

    @property
    def most_mixed(self) -> float:
        """Tokens up to which a pass of prompts and single ones takes less than one of each.

        Where layers are one call for single tokens, those that it computes of prompts.
        """
        if not self._layers.known:
            return math.inf
        one = self._runtime.comm.mesh.cp_size == 1
        return min(self.traits.few_rows, self.products.most_rows) if one else self.traits.sliced_rows

    def remove(self) -> None:
        """Take the hooks off the model."""
        for kernel in self._kernels:
            kernel.remove()
        if self._slices is not None:
            self._slices.remove()
        self._linears.remove()
        self._last_layer.remove()
        self._before_handle.remove()
        self._after_handle.remove()

    # Before

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        inputs = self._bind(model, args, kwargs)
        embeds, ids = inputs.get("inputs_embeds"), inputs.get("input_ids")
        source = ids if embeds is None else embeds
        if source is None or (ids is not None and embeds is not None):
            raise ValueError("pass exactly one of input_ids and inputs_embeds")
        if embeds is not None and embeds.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                "inputs_embeds requires gradients, which MegaKV does not compute: it is for inference; pass "
                "inputs_embeds.detach(), or call under torch.no_grad()"
            )
        batch, length = source.shape[:2]
        cache = self._cache(inputs)
        past, pasts = cache.length, cache.pasts(batch)
        generation = self._runtime.generation
        if length == 1 and generation is not None and generation.made(cache):
            # Known here: to read them, the host would wait for the device.
            mask, positions = np.ones((batch, 1), dtype=bool), cache.table.next_positions()[:, None]
        else:
            mask = self._mask(inputs.get("attention_mask"), batch, length, past)
            positions = self._positions.of(inputs, mask, length, pasts)
        new = new_tokens(mask[:, -length:], positions, pasts)
        if len(new) == 0:
            # A piece of a longer prompt may be nothing but padding, as the first of those that a prompt is cut into.
            held = cache.length > 0 and bool(cache.table.counts().any())
            prompt = None if generation is None else generation.prompt
            if not held and (prompt is None or past + length >= prompt.stop):
                raise ValueError("the prompt is empty: input_ids has no token that attention_mask keeps")
        wanted = Wanted.of(inputs.get("logits_to_keep", 0), mask[:, -length:], pasts)
        options: dict[str, Any] = {name: inputs.get(name) is not False for name in ("use_cache", "return_dict")}
        options[LONGEST] = inputs.pop(LONGEST, 0)
        step = self._runtime.current = self._runtime.plan(new, cache, past + length, wanted, **options)
        step.state.kernel = next((kernel for kernel in self._kernels if kernel.takes(step)), None)
        prompts = None if generation is None else generation.prompts
        cache.begin(step.layout, batch, prompts=prompts, stays=step.stays, turn=step.compression.turn is not None)
        if step.compression.evict:
            cache.evicts(step.slots)
        self._fill(inputs, step, source, pasts, embeds is not None)
        # From here on a rank waits for others: whoever fails leaves them with half of a pass.
        self._runtime.comm.watch.failures.begin_pass()
        self._runtime.comm.ledger.enter_dense()
        return (), inputs

    def _bind(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        # Decoding names all of its arguments.
        inputs = dict(kwargs)
        if args:
            inputs = dict(self._signature.bind_partial(model, *args, **kwargs).arguments)
            inputs.pop("self", None)
            inputs.update(inputs.pop("kwargs", {}))
        for name, reason in REFUSED_INPUTS.items():
            value = inputs.get(name)
            if value is not None and value is not False:
                raise ValueError(f"{name} is not supported with MegaKV: {reason}")
        return inputs

    def _cache(self, inputs: dict[str, Any]) -> ShardedCache:
        given = inputs.get("past_key_values")
        if given is not None and not isinstance(given, ShardedCache):
            raise ValueError(
                f"past_key_values is a {type(given).__name__}; MegaKV keeps its own sharded cache, "
                "use engine.session() to continue from one"
            )
        if self._runtime.generation is None:
            return given if given is not None else self.new_cache()
        held = self._runtime.generation.cache
        # Some models drop the cache when they cross a length and start over from the whole sequence.
        if given is None and held.length:
            held.reset()
        return held

    @staticmethod
    def _mask(mask: Any, batch: int, length: int, past: int) -> NDArray[np.bool_]:
        """``[B, T]`` or ``[B, P + T]`` which slots hold real tokens."""
        if mask is None:
            return np.ones((batch, length), dtype=bool)
        if not isinstance(mask, Tensor) or mask.dim() != 2:
            raise ValueError(
                "attention_mask must be a 2-D tensor of 0 and 1; other masks are not supported with MegaKV"
            )
        if mask.shape[0] != batch or mask.shape[1] not in (length, past + length):
            raise ValueError(
                f"attention_mask has shape {tuple(mask.shape)}; {batch} rows of {length} new"
                f"{f' or {past + length} cached and new' if past else ''} tokens were expected"
            )
        return mask.detach().cpu().numpy().astype(bool)

    def _fill(self, inputs: dict[str, Any], step: PassPlan, source: Tensor, pasts: IntArray, embedded: bool) -> None:
        """Replace the global inputs by this rank's packed ones."""
        tokens = step.tokens
        sequence, column, position = tokens.sequence, tokens.slot - pasts[tokens.sequence], tokens.position
        if len(tokens) < step.last.length:
            sequence = np.append(sequence, 0)
            column = np.append(column, 0)
            position = np.append(position, step.layout.max_position)
        device = source.device
        if len(tokens) == len(sequence) == source.shape[0] * source.shape[1]:
            # All of them, in their order.
            packed = source.flatten(0, 1)
        else:
            packed = source[upload(sequence, device), upload(column, device)]
        inputs["inputs_embeds" if embedded else "input_ids"] = packed.unsqueeze(0)
        inputs.pop("position_ids", None)
        if self._positions.taken:
            inputs["position_ids"] = upload(position, device).unsqueeze(0)
        inputs["attention_mask"] = None
        inputs["past_key_values"] = step.cache
        inputs["use_cache"] = True
        inputs["return_dict"] = True
        index = step.last.rows
        inputs.pop("logits_to_keep", None)
        if self._keeps_logits:
            # Not 0: of a number, some models leave out rows before the last layer.
            inputs["logits_to_keep"] = slice(None) if index is None else index

    # After

    def _after(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        step = self._runtime.current
        self._runtime.current = None
        self._runtime.comm.ledger.leave_dense()
        if step is None:
            return None
        if not hasattr(output, "logits"):
            # The model raised: leave the cache as it was before.
            step.cache.undo()
            return None
        try:
            logits = self._after_pieces(step, self._share(step, output.logits))
            if step.cache.outlives:
                self._runtime.comm.confirm()
        except BaseException:
            # Another rank's model did.
            step.cache.undo()
            raise
        self._runtime.comm.ledger.leave_dense()
        compression = step.compression
        first = None if compression.turn is None else compression.turn.first
        step.cache.commit(step.slots, compressed=compression.compress, first=first, proposed=step.proposed)
        step.cache.evicted(compression.evict)
        self._runtime.comm.watch.failures.inside = False
        output.logits = logits
        if not step.use_cache:
            # Made anew: an entry that was there once stays in a model's output, for `generate` to find.
            output = type(output)(**{**output, "past_key_values": None})
        return output if step.return_dict else output.to_tuple()

    def _after_pieces(self, step: PassPlan, logits: Tensor) -> Tensor:
        """``[B, C, V]`` logits where a prompt comes in pieces, of which the last may have nothing but padding of a row.

        What follows the row's last token, as where the prompt is read whole, was then known after an earlier piece.
        """
        generation, wanted = step.generation, step.wanted
        prompt = None if generation is None else generation.prompt
        if generation is None or prompt is None or step.slots > prompt.stop or wanted.columns > 1:
            return logits
        if generation.earlier is not None and step.cache.length > prompt.first:
            absent = np.setdiff1d(np.arange(step.batch), wanted.sequence)
            if len(absent):
                rows = upload(absent, logits.device)
                logits[rows] = generation.earlier[rows]
        generation.earlier = logits if step.slots < prompt.stop else None
        return logits

    def _share(self, step: PassPlan, logits: Tensor) -> Tensor:
        """``[B, C, V]`` the wanted logits on every rank, bit for bit those of the rank that computed them."""
        wanted, comm, device = step.wanted, self._runtime.comm, logits.device
        everywhere = step.state.gathered_logits is logits
        mine = logits[0, : len(step.local)] if self._keeps_logits else logits[0, upload(step.local, device)]
        batch = 1 if wanted.flat else step.batch
        shape = batch, wanted.columns, logits.shape[-1]
        shared: Tensor | None = None
        for owner in range(1 if step.layout.replicated else step.layout.size):
            rows, _ = step.wanted_of(owner)
            if not len(rows):
                continue
            own = everywhere or owner == step.rank
            piece = mine.contiguous() if own else logits.new_empty((len(rows), logits.shape[-1]))
            if not everywhere:
                comm.broadcast(piece, owner * comm.mesh.tp_size, operation="logits")
            if len(rows) == batch * wanted.columns:
                # All of them, in their order.
                shared = piece.view(shape)
                break
            shared = logits.new_zeros(shape) if shared is None else shared
            sequence = 0 * rows if wanted.flat else wanted.sequence[rows]
            shared[upload(sequence, device), upload(wanted.column[rows], device)] = piece
        shared = logits.new_zeros(shape) if shared is None else shared
        return shared if wanted.picked is None else shared[:, upload(wanted.picked, device)]


def _last_rows(runtime: Runtime) -> LastRows | None:
    """The rows of the last layer that are wanted in the pass under way, where it may leave out others.

    Few tokens all go through it: whether it is one call or many, ranks' messages are the same.
    """
    step = runtime.current
    return None if step is None or step.token_step is not None else step.last
