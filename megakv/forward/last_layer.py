"""The last layer computes only the tokens whose logits are asked for: nobody reads the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from megakv.forward.pass_plan import LastRows
from megakv.weights.placement.attention import OUTPUTS, SEPARATE, attention_modules
from megakv.weights.placement.plan import decoder_layers, feed_forward_linears

QUERIES = SEPARATE[0]


class LastLayerRows:
    """Hooks on linears of a model's last decoder layer, until `remove`. In a pass that wants all rows they do nothing.

    Of it, keys and values of all tokens are kept; queries, attention, and what follows it token by token may leave out
    all but the tokens whose logits are wanted. Their results are zero instead. The feed-forward of layers with experts
    is left alone: its linears see tokens in an order of their own. So are projections that are fused.

    `wanted` gives the rows of the pass under way that are, if there is one. `attention` is the index of the attention
    layer whose queries may be left out, if it is known which one the last is.
    """

    def __init__(self, model: PreTrainedModel, wanted: Callable[[], LastRows | None]):
        self.attention: int | None = None
        self._wanted = wanted
        self._handles: list[Any] = []
        try:
            _, layers = decoder_layers(model)
        except ValueError:
            return
        *others, last = (attention_modules(layer) for layer in layers)
        if len(last) == 1 and not any(found.layer_idx == last[0].layer_idx for each in others for found in each):
            self.attention = last[0].layer_idx
            for name, child in last[0].named_children():
                if name in OUTPUTS:
                    self._hook(child, self._narrow)
                elif name == QUERIES:
                    self._hook(child, self._narrow_queries)
        mixed = any(isinstance(module, nn.ModuleList) for module in layers[-1].modules())
        if mixed or any(parameter.ndim > 2 for parameter in layers[-1].parameters()):
            return
        for parent, name in feed_forward_linears(layers[-1]):
            self._hook(getattr(parent, name), self._narrow)

    def _hook(self, linear: nn.Module, narrow: Any) -> None:
        self._handles += [linear.register_forward_pre_hook(narrow), linear.register_forward_hook(self._widen)]

    def remove(self) -> None:
        """Take the hooks off the model."""
        for handle in self._handles:
            handle.remove()

    def _narrow_queries(self, linear: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        wanted = self._wanted()
        return None if wanted is None or not wanted.queries else self._narrow(linear, inputs)

    def _narrow(self, linear: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        wanted = self._wanted()
        if wanted is None or wanted.rows is None:
            return None
        hidden, *others = inputs
        assert hidden.shape[-2] == wanted.length
        return (hidden.index_select(-2, wanted.rows), *others)

    def _widen(self, linear: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        wanted = self._wanted()
        if wanted is None or wanted.rows is None or output.shape[-2] == wanted.length:
            return None
        whole = output.new_zeros((*output.shape[:-2], wanted.length, output.shape[-1]))
        return whole.index_copy_(-2, wanted.rows, output)
