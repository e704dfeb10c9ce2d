"""The last layer's feed-forward computes only the tokens whose logits are asked for: nobody reads the others."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from megakv.fp8 import feed_forward_linears
from megakv.placement.plan import decoder_layers


class LastLayerRows:
    """Hooks on the feed-forward linears of a model's last decoder layer.

    A prompt's logits are wanted for its last token alone. What follows the last attention works token by token, so
    these linears may leave out all other tokens; their results are zero instead. Layers with experts are left alone:
    their linears see tokens in an order of their own.

    Parameters
    ----------
    model : PreTrainedModel

    Attributes
    ----------
    rows : Tensor or None
        ``[n]`` packed rows that are wanted of the pass under way; None for all.
    length : int
        Packed rows of the pass.
    """

    def __init__(self, model: PreTrainedModel):
        self.rows: Tensor | None = None
        self.length = 0
        self._handles: list[Any] = []
        try:
            _, layers = decoder_layers(model)
        except ValueError:
            return
        last = layers[-1]
        mixed = any(isinstance(module, nn.ModuleList) for module in last.modules())
        if mixed or any(parameter.ndim > 2 for parameter in last.parameters()):
            return
        for parent, name in feed_forward_linears(last):
            linear = getattr(parent, name)
            self._handles.append(linear.register_forward_pre_hook(self._narrow))
            self._handles.append(linear.register_forward_hook(self._widen))

    def want(self, rows: Tensor, length: int) -> None:
        """Say which of a pass's packed rows are wanted."""
        self.rows, self.length = (rows, length) if len(rows) < length else (None, length)

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def _narrow(self, linear: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        if self.rows is None:
            return None
        (hidden,) = inputs
        assert hidden.shape[-2] == self.length
        return (hidden.index_select(-2, self.rows),)

    def _widen(self, linear: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if self.rows is None:
            return None
        whole = output.new_zeros((*output.shape[:-2], self.length, output.shape[-1]))
        return whole.index_copy_(-2, self.rows, output)
