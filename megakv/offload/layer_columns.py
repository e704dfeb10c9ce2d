"""Prompts column by column: a decoder layer computes the groups of a batch one behind the other (KVPR, Algorithm 1).

Its weights are brought once for all of them, and what it works with at its peak is one group's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megakv.base.device import upload
from megakv.forward.pass_plan import LastRows, PassPlan, PassState
from megakv.forward.runtime import Runtime
from megakv.offload.cache import group_layout
from megakv.weights.placement.plan import decoder_layers

HIDDEN = "hidden_states"


class LayerColumns:
    """Hooks on a model's decoder layers, which compute group by group what their model hands over whole.

    While a layer computes a group, the pass under way of its engine is one over that group alone. `groups` are those of
    the whole pass. One that computes a single token of each sequence goes group by group within attention only:
    projections and feed-forward read all of their weights, however few their rows are. So do models without a list of
    decoder layers.
    """

    def __init__(self, model: PreTrainedModel, runtime: Runtime, groups: Callable[[], Sequence[range]]):
        self._runtime, self._groups = runtime, groups
        self._whole: PassPlan | None = None
        self._found: list[Any] = []
        self._handles: list[Any] = []
        with suppress(ValueError):
            for layer in decoder_layers(model)[1]:
                self._handles.append(layer.register_forward_pre_hook(self._begin, with_kwargs=True))
                self._handles.append(layer.register_forward_hook(self._end))

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """All groups but the last are computed here, and the last one by the call that follows."""
        self._whole, self._found, step = None, [], self._runtime.current
        parts = [] if step is None else step.once("columns", lambda: self._parts(step))
        hidden = args[0] if args else kwargs.get(HIDDEN)
        if step is None or not parts or not isinstance(hidden, Tensor) or hidden.shape[:-1] != (1, len(step.tokens)):
            return None
        self._whole = step
        for rows, part in parts:
            self._runtime.current = part
            own = _cut((args, kwargs), rows, len(step.tokens))
            if part.more:
                self._found.append(layer.forward(*own[0], **own[1]))
        return own

    def _end(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if self._whole is None:
            return None
        found, self._found = [*self._found, output], []
        self._runtime.current, self._whole = self._whole, None
        return _joined(found)

    def _parts(self, step: PassPlan) -> list[tuple[slice, PassPlan]]:
        """The pass over each group, and its rows; none where layers compute them all at once."""
        groups, tokens = self._groups(), step.tokens
        bounds = [int(tokens.bounds[group.start]) for group in groups] + [len(tokens)]
        # What compression looks at is the whole batch's.
        if (
            len(groups) == 1
            or step.layout.size > 1
            or not step.compression.idle
            or tokens.single
            or 0 in np.diff(bounds)
        ):
            return []
        found = []
        for index, (group, ends) in enumerate(zip(groups, pairwise(bounds), strict=True)):
            rows, layout = slice(*ends), group_layout(step.layout, group)
            local = step.local[(step.local >= rows.start) & (step.local < rows.stop)] - rows.start
            whole, length = step.last.rows, rows.stop - rows.start
            wanted = None
            if whole is not None and len(local) < length:
                wanted = upload(local if len(local) else np.zeros(1, dtype=np.int64), whole.device)
            last = LastRows(wanted, length, layout.wanted is not None)
            more = index + 1 < len(groups)
            part = replace(step, layout=layout, last=last, part=index, more=more, state=PassState())
            found.append((rows, part))
        return found


def _cut(value: Any, rows: slice, length: int) -> Any:
    """Arguments of a layer with some rows of all tensors that have one for each of so many packed tokens."""
    if isinstance(value, tuple | list):
        return tuple(_cut(each, rows, length) for each in value)
    if isinstance(value, dict):
        return {name: _cut(each, rows, length) for name, each in value.items()}
    if not isinstance(value, Tensor):
        return value
    # Hidden states, positions and their embeddings, with or without dimensions of one in front.
    leading = next((dim for dim, size in enumerate(value.shape) if size != 1), value.ndim)
    if leading == value.ndim or value.shape[leading] != length:
        return value
    return value.narrow(leading, rows.start, rows.stop - rows.start)


def _joined(found: Sequence[Any]) -> Any:
    """What a layer returns, of all groups."""
    if isinstance(found[0], Tensor):
        return torch.cat(tuple(found), dim=-2)
    if isinstance(found[0], tuple):
        return tuple(_joined(each) for each in zip(*found, strict=True))
    return found[-1]
