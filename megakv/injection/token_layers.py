"""Decoder layers of the Llama kind in passes of few tokens on processors: two compiled calls around their attention.

A layer is of that kind where the code of its modules is Llama's, Mistral's, Qwen2's or Qwen3's, read from this very
version of transformers, and nobody has hooks inside it or has replaced what they compute. All else is as it was.
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import itertools
import operator
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megakv.attention.layer import ACTIVATIONS, LayerCalls, LayerWeights, Norm, Weight, load_layer
from megakv.attention.linear import FEW_ROWS
from megakv.forward_pass import ForwardPass
from megakv.injection.interface import attend_of, described_mask, scoring_of
from megakv.injection.linear_slices import GatheredRows, KeptRows, LinearSlices, SummedColumns
from megakv.injection.linears import FewRowsForward, Products
from megakv.library import TYPES
from megakv.weights.placement.plan import decoder_layers
from megakv.weights.tensor_parallel import RowParallelLinear

KINDS = ("llama", "mistral", "qwen2", "qwen3")
LAYER = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
HEAD_NORMS = ("q_norm", "k_norm")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
EMBEDDINGS = "position_embeddings"
Current = Callable[[], ForwardPass | None]


class _Bare(ast.NodeTransformer):
    """Code without what does not run: annotations, decorators, names and documentation of functions."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name, node.decorator_list, node.returns = "", [], None
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        return node if node.value is None else ast.Assign([node.target], node.value)


@functools.cache
def _code(function: Callable[..., Any]) -> str:
    """What a function does, whatever it is called; empty if nobody knows."""
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return ""
    return ast.dump(_Bare().visit(ast.parse(source)))


def _codes(layer: Any) -> tuple[str, ...]:
    """What a decoder layer's forward runs, but for linears and the activation."""
    attention: Any = type(layer.self_attn)
    rotary = attention.forward.__globals__.get("apply_rotary_pos_emb")
    turned = getattr(rotary, "__globals__", {}).get("rotate_half")
    modules = [getattr(layer, name) for name in LAYER]
    modules += [getattr(layer.self_attn, name) for name in HEAD_NORMS if hasattr(layer.self_attn, name)]
    return tuple(_code(function) for function in (*(type(module).forward for module in modules), rotary, turned))


@functools.cache
def _known() -> frozenset[tuple[str, ...]]:
    """The codes of the layers that the compiled calls compute."""
    found = set()
    for kind in KINDS:
        file = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
        name = next(name for name in vars(file) if name.lower() == f"{kind}decoderlayer")
        config = importlib.import_module("transformers").AutoConfig.for_model(
            kind, hidden_size=8, intermediate_size=8, num_attention_heads=1, num_key_value_heads=1, num_hidden_layers=1
        )
        with torch.device("meta"):
            found.add(_codes(getattr(file, name)(config, 0)))
    return frozenset(codes for codes in found if all(codes))


def _activation(function: Any) -> int | None:
    """The number of a feed-forward's activation."""
    values = torch.linspace(-9, 9, 257, device="cpu")
    with torch.no_grad():
        found = function(values)
        for kind, known in enumerate(ACTIVATIONS):
            if torch.allclose(found, known(values), 0, 1e-7):
                return kind
    return None


def is_known(layer: Any) -> bool:
    """Whether a decoder layer is of the Llama kind, in a type and of a shape that the compiled calls know."""
    if tuple(name for name, _ in sorted(layer.named_children())) != tuple(sorted(LAYER)):
        return False
    attention, feed_forward = layer.self_attn, layer.mlp
    found = {name for name, _ in attention.named_children()}
    if found - set(HEAD_NORMS) != set(PROJECTIONS) or len(found & set(HEAD_NORMS)) not in (0, len(HEAD_NORMS)):
        return False
    if {name for name, _ in feed_forward.named_children()} - {"act_fn"} != set(FEED_FORWARD):
        return False
    linears = [*(getattr(attention, name) for name in PROJECTIONS), *(getattr(feed_forward, n) for n in FEED_FORWARD)]
    plain = all(type(linear) in (nn.Linear, RowParallelLinear) and linear.weight.dim() == 2 for linear in linears)
    kinds = {(parameter.dtype, parameter.device.type) for parameter in layer.parameters()}
    if not plain or len(kinds) != 1 or next(iter(kinds)) not in ((dtype, "cpu") for dtype in TYPES):
        return False
    if any(isinstance(linear, RowParallelLinear) for linear in linears[:3] + linears[4:6]) or attention.head_dim % 2:
        return False
    replaced = (
        "forward" in vars(module) and not isinstance(vars(module)["forward"], FewRowsForward)
        for module in layer.modules()
    )
    return not any(replaced) and _codes(layer) in _known() and _activation(feed_forward.act_fn) is not None


@dataclass(frozen=True)
class _Plan:
    """How a layer is computed on this rank."""

    calls: LayerCalls
    gather: GatheredRows | None
    """What makes all queries, keys and values of this rank's rows."""
    projects: bool
    """Whether the output projection is a call of its own, with a sum over ranks behind it."""
    add: Callable[[Tensor, Tensor], Tensor] | None
    """Adds what all ranks have of the feed-forward to the hidden states behind attention, from this rank's part of it;
    None where that is all."""


class TokenLayer:
    """In the place of the `forward` of one decoder layer that `is_known`; what other passes take is as before."""

    def __init__(self, layer: Any, products: Products, slices: LinearSlices | None, current: Current):
        self.layer = layer
        self._rows = {torch.float32: FEW_ROWS}.get(layer.input_layernorm.weight.dtype, products.most_rows)
        self._slices, self._current = slices, current
        self.before = layer.forward
        self._attention: Any = layer.self_attn
        self._modules = [module for module in layer.modules() if module is not layer]
        hooks = ((module._forward_hooks, module._forward_pre_hooks) for module in self._modules)
        self._hooks = list(itertools.chain.from_iterable(hooks))
        self._fields = [
            (own._parameters, name) for own in self._modules for name, _ in own.named_parameters(recurse=False)
        ]
        self._parameters: list[Tensor] = []
        self._places: list[Callable[[], int]] = []
        self._plans: dict[bool, _Plan] = {}
        self._addresses: list[int] = []

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """``[1, L, h]`` to the same."""
        step, embeddings = self._current(), kwargs.get(EMBEDDINGS)
        if args or step is None or step.token_step is None or step.recomputing or any(self._hooks):
            return self.before(hidden_states, *args, **kwargs)
        plan = self._plan(step.slices)
        if not isinstance(embeddings, tuple) or not self._fits(plan.calls, hidden_states, *embeddings):
            return self.before(hidden_states, *args, **kwargs)
        calls, (cos, sin) = plan.calls, embeddings
        found = calls.project(hidden_states, cos, sin, whole=plan.gather is None)
        if plan.gather is not None:
            found = plan.gather.gathered(found)
            calls.rotate(found, cos, sin)
        window = described_mask(self._attention, kwargs.get("attention_mask")).window
        q, k, v = calls.heads(found)
        attend, scoring = attend_of(self._attention), scoring_of(self._attention.scaling, window, None)
        attended = attend(self._attention.layer_idx, q, k, v, scoring, None)
        if plan.projects:
            attended = self._attention.o_proj(attended.flatten(2))
        middle, out = calls.feed_forward(hidden_states, attended, projected=plan.projects, whole=plan.add is None)
        return out if plan.add is None else plan.add(middle, out)

    def _fits(self, calls: LayerCalls, x: Tensor, *embeddings: Tensor) -> bool:
        rows, dim = x.shape[-2], calls.weights.head_dim
        if rows > self._rows or x.dtype != calls.dtype or type(x) is not Tensor or len(embeddings) != 2:
            return False
        shapes = all(part.shape == (1, rows, dim) and part.dtype == x.dtype for part in embeddings)
        contiguous = x.is_contiguous() and all(part.is_contiguous() for part in embeddings)
        return shapes and contiguous and x.device.type == "cpu" and not torch.is_grad_enabled()

    def _plan(self, sliced: bool) -> _Plan:
        """Made anew where weights lie elsewhere than before."""
        parameters: list[Any] = [own[name] for own, name in self._fields]
        if len(parameters) != len(self._parameters) or not all(map(operator.is_, parameters, self._parameters)):
            self._parameters, self._places = parameters, [parameter.data_ptr for parameter in parameters]
        addresses = [place() for place in self._places]
        if addresses != self._addresses:
            self._addresses, self._plans = addresses, {}
        if sliced not in self._plans:
            self._plans[sliced] = self._made(self._slices if sliced else None)
        return self._plans[sliced]

    def _made(self, slices: LinearSlices | None) -> _Plan:
        attention, feed_forward = self._attention, self.layer.mlp
        fields = dict[str, Any]()
        gather: GatheredRows | None = None
        for name in (*PROJECTIONS, *FEED_FORWARD):
            linear = getattr(attention if name in PROJECTIONS else feed_forward, name)
            part = None if slices is None else slices.part(linear)
            weight, bias = linear.weight, linear.bias
            if isinstance(part, GatheredRows):
                gather, own = part, part.own.get(id(linear))
                weight, bias = (weight[:0], None) if own is None else own.views()
            elif isinstance(part, KeptRows):
                (own,) = part.own
                weight, bias = own.views()
            elif isinstance(part, SummedColumns):
                weight, bias = part.own.views()
            elif isinstance(linear, RowParallelLinear):
                bias = None
            fields[name.removesuffix("_proj")] = Weight(weight.detach(), None if bias is None else bias.detach())
        fields |= {name: _norm(getattr(attention, name)) for name in HEAD_NORMS if hasattr(attention, name)}
        dim = attention.head_dim
        weights = LayerWeights(
            heads=attention.q_proj.weight.shape[0] // dim,
            kv_heads=attention.k_proj.weight.shape[0] // dim,
            head_dim=dim,
            activation=_activation(feed_forward.act_fn) or 0,
            input_norm=_norm(self.layer.input_layernorm),
            output_norm=_norm(self.layer.post_attention_layernorm),
            **fields,
        )
        kernel, _ = load_layer()
        assert kernel is not None
        reduces = [
            isinstance(linear, RowParallelLinear) or (slices is not None and slices.part(linear) is not None)
            for linear in (attention.o_proj, feed_forward.down_proj)
        ]
        calls, add = LayerCalls(kernel, weights), None
        if reduces[1]:
            add = functools.partial(self._added, calls, None if slices is None else slices.part(feed_forward.down_proj))
        return _Plan(calls, gather, reduces[0], add)

    def _added(self, calls: LayerCalls, part: Any, middle: Tensor, own: Tensor) -> Tensor:
        linear = self.layer.mlp.down_proj
        if isinstance(part, SummedColumns):
            return calls.add(middle, part.summands(own), linear.bias)
        return calls.add(middle, linear.all_reduce(own)[None], linear.bias)


def _norm(module: Any) -> Norm:
    return Norm(module.weight.detach(), module.variance_epsilon)


class TokenLayers:
    """Another `forward` for those decoder layers of a model that are of the kind, until `remove`."""

    def __init__(self, model: PreTrainedModel, products: Products, slices: LinearSlices | None, current: Current):
        self.layers = [TokenLayer(layer, products, slices, current) for layer in _known_layers(model)]
        for own in self.layers:
            own.layer.forward = own

    def remove(self) -> None:
        """Give the layers their own `forward` back."""
        for own in self.layers:
            del own.layer.forward


def _known_layers(model: PreTrainedModel) -> Iterator[nn.Module]:
    try:
        layers = list(decoder_layers(model)[1])
    except ValueError:
        return
    if load_layer()[0] is not None:
        yield from (layer for layer in layers if is_known(layer))
