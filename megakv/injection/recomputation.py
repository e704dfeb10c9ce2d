"""Keys and values from kept activations (KVPR, Equation 7), by each attention module's own code.

What is kept of a token is the input of its layer's attention module, after the norm. To recompute, the module's own
`forward` runs on such inputs and is stopped where it calls attention, with keys and values in hand: biases, fused
projections, norms of keys, partial and interleaved rotary embeddings are the family's own. Queries, which nobody
needs, are not computed where the module has a projection for them alone.

Where rotary frequencies follow the length (dynamic NTK, longrope), a token's rotary embeddings are kept beside its
input: its key stays rotated as in the pass that made it, whatever passes and sequences come later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megakv.base.device import upload
from megakv.distributed.sharding import IntArray
from megakv.forward.pass_plan import PassPlan
from megakv.injection.interface import ATTEND_ATTRIBUTE, stopped_at_attention
from megakv.injection.policy import depends_on_length

QUERY_PROJECTION = "q_proj"
HIDDEN = "hidden_states"
CACHES = ("past_key_values", "layer_past")
"""Arguments that are not kept from a call: they would keep a cache alive that nobody else holds."""
TABLE_ROWS = 1024
"""Positions by which the table of rotary embeddings grows."""


class _NoQueries(nn.Module):
    """Zeros without memory in the place of a query projection."""

    def __init__(self, width: int):
        super().__init__()
        self._width = width

    def forward(self, hidden: Tensor) -> Tensor:
        """``[..., h]`` to ``[..., width]``."""
        return hidden.new_zeros(()).expand(*hidden.shape[:-1], self._width)


class _RotaryTable:
    """Rotary embeddings by position, as the model computed them for the tokens it has seen."""

    def __init__(self) -> None:
        self._columns: tuple[Tensor, ...] = ()

    def learn(self, embeddings: tuple[Tensor, ...], positions: IntArray) -> None:
        """Take those of a pass: each ``[1, L, R]`` or ``[B, L, R]`` of one row."""
        # A rank without tokens in the pass computes a stand-in row, which is nobody's.
        needed = int(positions.max()) + 1 if len(positions) else 0
        if not self._columns:
            self._columns = tuple(part.new_zeros((0, *part.shape[2:])) for part in embeddings)
        if (missing := needed - len(self._columns[0])) > 0:
            grown = (0, 0) * (embeddings[0].ndim - 2) + (0, missing + TABLE_ROWS)
            self._columns = tuple(nn.functional.pad(column, grown) for column in self._columns)
        index = upload(positions, embeddings[0].device)
        for column, part in zip(self._columns, embeddings, strict=True):
            column.index_copy_(0, index, part[0])

    def rows(self, positions: Tensor) -> tuple[Tensor, ...]:
        """Those of some positions, each ``[1, n, R]``."""
        return tuple(column.index_select(0, positions).unsqueeze(0) for column in self._columns)


def _parts(embeddings: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Sines and cosines, or complex numbers that are both."""
    return (embeddings,) if isinstance(embeddings, Tensor) else embeddings


def _taken_apart(x_LE: Tensor, like: tuple[Tensor, ...]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Inputs ``[n, h]``, and rotary embeddings ``[1, n, R]`` like these, whose bits lie behind them."""
    widths = [part.shape[-1] * part.itemsize // x_LE.itemsize for part in like]
    hidden, *bits = x_LE.split([x_LE.shape[-1] - sum(widths), *widths], dim=-1)
    # Copies, which begin where numbers of any type may.
    copies = (part.clone(memory_format=torch.contiguous_format) for part in bits)
    found = tuple(part.view(wanted.dtype).unsqueeze(0) for part, wanted in zip(copies, like, strict=True))
    return hidden.contiguous(), found


class Recomputation:
    """Hooks on a model's attention modules: they show each layer's input, and run its first part again.

    ``entered(layer, hidden_LE)`` is called when a layer's attention module begins; `current` gives the pass under way.
    """

    def __init__(
        self, model: PreTrainedModel, *, entered: Callable[[int, Tensor], None], current: Callable[[], PassPlan]
    ):
        self._entered = entered
        self._current = current
        # A token's embeddings are then those of the pass that computed it, and no other pass makes them again.
        self._kept_with_inputs = depends_on_length(model)
        self._seen: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self._modules: dict[int, nn.Module] = {}
        self._tables: dict[int, _RotaryTable] = {}
        self._handles = []
        for module in model.modules():
            if getattr(module, ATTEND_ATTRIBUTE, None) is not None:
                layer: Any = module.layer_idx
                self._modules[layer] = module
                self._handles.append(module.register_forward_pre_hook(self.enter, with_kwargs=True))

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """An attention module begins with such arguments."""
        layer: Any = module.layer_idx
        hidden = args[0] if args else kwargs[HIDDEN]
        # Nor is the input itself: another takes its place.
        kept = {name: None if name == HIDDEN else kwargs[name] for name in kwargs if name not in CACHES}
        self._seen[layer] = args[1:], kept
        if kwargs.get("position_embeddings") is not None and not self._kept_with_inputs:
            self._learn(layer, _parts(kwargs["position_embeddings"]))
        self._entered(layer, hidden[0])

    def inputs(self, layer: int, hidden_LE: Tensor) -> Tensor:
        """What is to be kept of a layer's input while it begins: ``[L, h]``, or more columns (see above)."""
        embeddings = self._seen[layer][1].get("position_embeddings")
        if embeddings is None or not self._kept_with_inputs:
            return hidden_LE
        return torch.cat([hidden_LE, *(part[0].view(hidden_LE.dtype) for part in _parts(embeddings))], dim=-1)

    def _learn(self, layer: int, embeddings: tuple[Tensor, ...]) -> None:
        # Layers of a kind are given the same tensors; kinds differ where rotary frequencies do.
        step, known = self._current(), self._tables.get(layer)

        def learned() -> _RotaryTable:
            table, positions = known or _RotaryTable(), step.tokens.position
            table.learn(tuple(part[:, : len(positions)] for part in embeddings), positions)
            return table

        self._tables[layer] = step.once(("rotary", embeddings[0].data_ptr()), learned)

    def recompute(self, layer: int, x_LE: Tensor, positions: IntArray) -> tuple[Tensor, Tensor]:
        """Keys ``[K, n, D]``, values ``[K, n, Dv]`` from kept `inputs` of a layer that has begun in this pass."""
        module, (others, kwargs) = self._modules[layer], self._seen[layer]
        kwargs = dict(kwargs)
        if (embeddings := kwargs.get("position_embeddings")) is not None:
            if self._kept_with_inputs:
                x_LE, found = _taken_apart(x_LE, _parts(embeddings))
            else:
                found = self._embeddings(layer, positions, x_LE.device)
            kwargs["position_embeddings"] = found[0] if isinstance(embeddings, Tensor) else found
        if HIDDEN in kwargs:
            kwargs[HIDDEN] = x_LE.unsqueeze(0)
        if isinstance(kwargs.get("position_ids"), Tensor):
            kwargs["position_ids"] = self._on_device(positions, x_LE.device).unsqueeze(0)
        args = () if HIDDEN in kwargs else (x_LE.unsqueeze(0), *others)
        queries: Any = module._modules.get(QUERY_PROJECTION)
        queries = queries if hasattr(queries, "out_features") else None
        state = self._current().state
        state.recomputing = True
        if queries is not None:
            module._modules[QUERY_PROJECTION] = _NoQueries(queries.out_features)
        try:
            return stopped_at_attention(module, *args, **kwargs)
        finally:
            state.recomputing = False
            if queries is not None:
                module._modules[QUERY_PROJECTION] = queries

    def _embeddings(self, layer: int, positions: IntArray, device: torch.device) -> tuple[Tensor, ...]:
        table = self._tables[layer]
        key = id(table), positions.tobytes()
        return self._current().once(key, lambda: table.rows(self._on_device(positions, device)))

    def _on_device(self, positions: IntArray, device: torch.device) -> Tensor:
        """Positions, copied once in a pass: every layer asks for the same."""
        return self._current().once(positions.tobytes(), lambda: upload(np.ascontiguousarray(positions), device))
