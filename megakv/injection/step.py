"""Step kernels: what computes a model's decoder layers in the place of PyTorch, where it can; and those of processors.

There are none, those of processors (`TokenLayers`), or CUDA graphs (`megakv.injection.step_graphs`): without them the
model computes what it always does.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from megakv.attention.layer import load_layer
from megakv.forward.pass_plan import Generation, PassPlan
from megakv.forward.runtime import Runtime
from megakv.injection.layer_kind import calls_in_turn
from megakv.injection.linear_slices import LinearSlices
from megakv.injection.linears import layers_of
from megakv.injection.prompt_layer import Blocks
from megakv.injection.token_forward import TokenLayer
from megakv.weights.products import Products


class StepKernel(Protocol):
    """Puts itself in the place of a `forward` of the model, or of its layers, until `remove`."""

    def takes(self, step: PassPlan) -> bool:
        """A pass begins: whether layers may be computed so in it. For each, its inputs say whether it is."""

    def remove(self) -> None:
        """Give the model its own `forward` back."""


class TokenLayers:
    """Another `forward` for a model's decoder layers, until `remove`, where their weights stay `here`.

    Layers of the Llama kind are computed by compiled calls, others are as they were. Which those are is looked at when
    a call begins with few tokens, and for every prompt, but for parts of one that are read beside a step of decoding.
    Every rank must make it: all compute alike.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        products: Products,
        slices: LinearSlices | None,
        runtime: Runtime,
        *,
        here: bool,
    ):
        self._comm, self._decoder, self._blocks = runtime.comm, model.get_decoder(), Blocks()
        self.layers: list[TokenLayer] = []
        # The `generate` call that it was looked at for; and whether a pass over prompts has come since.
        self._generation: Callable[[], Generation | None] = lambda: None
        self._stale = True
        self._found: list[Any] = []
        self.known = False
        """Whether some layer was of the kind when it was looked at last."""
        if self._comm.mesh.device.type != "cpu" or not here:
            return
        kernel, _ = load_layer()
        if not all(self._comm.gather_objects(kernel is not None)):
            return
        assert kernel is not None
        agreed = dict[Any, bool]()
        for layer in {id(layer): layer for layer in layers_of(model)}.values():
            if "forward" not in vars(layer):
                own = TokenLayer(layer, kernel, products, slices, runtime, self._blocks, agreed)
                layer.forward, own.index = own, len(self.layers)
                self.layers.append(own)

    def takes(self, step: PassPlan) -> bool:
        """See `StepKernel`. Before prompts, and before the first pass of few tokens in a call, layers are looked at.

        Passes over several caches are calls of their own: there it is done where a prompt begins, where no sequence
        goes on by a single token, and for the first pass behind those of many tokens. It is done again where somebody
        has begun to listen, or has replaced what calls layers, at any time.
        """
        if step.token_step is None:
            if len(step.tokens) >= self._blocks.least_rows:
                self._look()
            self._stale = True
            return self.known
        same = step.generation is not None and step.generation is self._generation()
        if step.generation is None or step.proposed:
            # As a step of decoding, whatever else is beside it. Of a server, each pass with candidates has its own.
            goes_on = (step.token_step.decodes or step.proposed) and step.cache.pasts(step.batch).all()
            same = same or (step.cache.outlives and bool(goes_on))
        if self._stale or not same or self._state() != self._found:
            self._look()
        # Not held: with it goes its cache.
        self._generation = (lambda: None) if step.generation is None else weakref.ref(step.generation)
        self._stale = False
        return self.known

    def _look(self) -> None:
        for own in self.layers:
            own.look()
        layers = [own.layer for own in self.layers]
        called = self.layers and all(vars(own.layer).get("forward") is own for own in self.layers)
        if called and calls_in_turn(self._decoder, layers):
            self.layers[0].following = self.layers
        self._found, self.known = self._state(), any(own.known for own in self.layers)

    def at_once(self) -> bool:
        """Whether this rank computes all layers in such calls, and meets no others."""
        if found := self._comm.mesh.cp_size == self._comm.mesh.tp_size == 1 and bool(self.layers):
            self._look()
        return found and all(own.known for own in self.layers)

    def meet_in_memory(self) -> bool:
        """Whether context-parallel ranks compute all layers in such calls, in which they find each other's messages in
        memory that they share. Collective.
        """
        channel, mesh = self._comm.channels.get("cp"), self._comm.mesh
        if mesh.cp_size == 1:
            return False
        if found := channel is not None and channel.in_memory and mesh.tp_size == 1 and bool(self.layers):
            self._look()
        return all(self._comm.gather_objects(found and all(own.known for own in self.layers)))

    def _state(self) -> list[Any]:
        """What may change within a call: hooks, of which PyTorch counts those that were ever there, what ranks exchange
        messages through, and what is called, in which order, with which scale.
        """
        decoder = self._decoder
        found: list[Any] = [RemovableHandle.next_id, self._comm.channels]
        for own in self.layers:
            layer, attention = vars(own.layer), own.layer._modules.get("self_attn")
            found += (layer.get("forward"), layer.get("_compiled_call_impl"), type(own.layer), type(attention))
            found += (id(attention), None if attention is None else vars(attention).get("scaling"))
        held = decoder._modules.get("layers")
        if held is not None:
            found += map(id, held._modules.values())
        return [*found, getattr(getattr(decoder, "config", None), "num_hidden_layers", None)]

    def remove(self) -> None:
        """See `StepKernel`."""
        for own in self.layers:
            if vars(own.layer).get("forward") is own:
                del own.layer.forward
            # They know each other: without this the model would stay until somebody looks for such circles.
            own.forget()
