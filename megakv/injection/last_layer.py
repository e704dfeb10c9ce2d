"""The last layer computes only the tokens whose logits are asked for: nobody reads the others."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from megakv.injection.interface import attention_modules
from megakv.weights.fp8 import feed_forward_linears
from megakv.weights.placement.attention import OUTPUTS, SEPARATE
from megakv.weights.placement.plan import decoder_layers

QUERIES = SEPARATE[0]


class LastLayerRows:
    """Hooks on linears of a model's last decoder layer.

    A prompt's logits are wanted for its last token alone. Of the last layer, keys and values of all tokens are kept;
    queries, attention, and what follows it token by token may leave out all others. Their results are zero instead. The
    feed-forward of layers with experts is left alone: its linears see tokens in an order of their own. So are
    projections that are fused.

    Parameters
    ----------
    model : PreTrainedModel

    Attributes
    ----------
    rows : Tensor or None
        ``[n]`` packed rows that are wanted of the pass under way; None for all.
    length : int
        Packed rows of the pass.
    attention : int or None
        Index of the attention layer whose queries may be left out, if it is known which one the last is.
    """

    def __init__(self, model: PreTrainedModel):
        self.rows: Tensor | None = None
        self.length = 0
        self.attention: int | None = None
        self._queries = False
        self._handles: list[Any] = []
        try:
            _, layers = decoder_layers(model)
        except ValueError:
            return
        last = layers[-1]
        indices = [_attention_index(layer) for layer in layers]
        if indices.count(indices[-1]) == 1:
            self.attention = indices[-1]
        if self.attention is not None:
            for name, child in attention_modules(last)[0].named_children():
                if name in OUTPUTS:
                    self._hook(child, self._narrow)
                elif name == QUERIES:
                    self._hook(child, self._narrow_queries)
        mixed = any(isinstance(module, nn.ModuleList) for module in last.modules())
        if mixed or any(parameter.ndim > 2 for parameter in last.parameters()):
            return
        for parent, name in feed_forward_linears(last):
            self._hook(getattr(parent, name), self._narrow)

    def want(self, rows: Tensor, length: int, *, queries: bool = False) -> None:
        """Say which of a pass's packed rows are wanted, and whether the last attention computes no other queries."""
        self.rows, self.length = (rows, length) if len(rows) < length else (None, length)
        self._queries = queries

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, linear: nn.Module, narrow: Any) -> None:
        self._handles.append(linear.register_forward_pre_hook(narrow))
        self._handles.append(linear.register_forward_hook(self._widen))

    def _narrow_queries(self, linear: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        return self._narrow(linear, inputs) if self._queries else None

    def _narrow(self, linear: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self.rows is None:
            return None
        hidden, *others = inputs
        assert hidden.shape[-2] == self.length
        return (hidden.index_select(-2, self.rows), *others)

    def _widen(self, linear: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if self.rows is None or output.shape[-2] == self.length:
            return None
        whole = output.new_zeros((*output.shape[:-2], self.length, output.shape[-1]))
        return whole.index_copy_(-2, self.rows, output)


def _attention_index(layer: nn.Module) -> int | None:
    """The index of a decoder layer's attention, if it has just one."""
    found = attention_modules(layer)
    return found[0].layer_idx if len(found) == 1 else None
