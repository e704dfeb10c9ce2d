"""Decoder layers of the Llama kind: known by the code that their modules run, line by line.

A layer is of it where that code is Llama's, Mistral's, Qwen2's or Qwen3's, read from the files of the installed
transformers, and nobody has replaced anything of it, or listens to what is inside.
"""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from megakv.attention.layer import ACTIVATIONS
from megakv.base.library import TYPES
from megakv.forward.last_layer import LastLayerRows
from megakv.injection.known_code import bare, code_of, forwards_of, parsed
from megakv.injection.linears import FewRowsForward
from megakv.injection.recomputation import Recomputation
from megakv.weights.placement.attention import SEPARATE
from megakv.weights.tensor_parallel import RowParallelLinear

KINDS = ("Llama", "Mistral", "Qwen2", "Qwen3")
LAYER = ("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
CLASSES = ("RMSNorm", "Attention", "RMSNorm", "MLP")
"""Of those, behind the name of a kind."""
DECODER = "Model"
"""Of what holds the layers."""
PROJECTIONS = (*SEPARATE, "o_proj")
HEAD_NORMS = ("q_norm", "k_norm")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
ACTIVATION = "act_fn"
ACTIVATION_TYPES = ("SiLU", "SiLUActivation", "GELUActivation", "GELUTanh")
OWN_HOOKS = LastLayerRows, Recomputation
"""Those that leave out rows of prompts do nothing where all rows are wanted, and inputs are shown by whoever calls."""
ROTARY, TURNED = "apply_rotary_pos_emb", "rotate_half"
TORCH_FILES = Path(torch.__file__).parent


def _codes(layer: Any) -> tuple[str, ...]:
    """What a decoder layer's forward runs, but for linears and the activation."""
    attention: Any = type(layer.self_attn).forward
    rotary = getattr(attention, "__globals__", {}).get(ROTARY)
    turned = getattr(rotary, "__globals__", {}).get(TURNED)
    modules = [layer, *(getattr(layer, name) for name in LAYER)]
    modules += [getattr(layer.self_attn, name) for name in HEAD_NORMS if hasattr(layer.self_attn, name)]
    return tuple(code_of(function) for function in (*(type(module).forward for module in modules), rotary, turned))


@functools.cache
def _known() -> frozenset[tuple[str, ...]]:
    """The codes of layers of the kind, as the files have them: nobody changes those."""
    return frozenset(codes for kind in KINDS if (codes := _in_file(kind)))


@functools.cache
def _known_decoders() -> frozenset[str]:
    """The codes of what calls one layer behind the other, with the same inputs but for what one gives the next."""
    return frozenset(bare(node) for kind in KINDS for node in forwards_of(parsed(kind), [f"{kind}{DECODER}"]) if node)


def _in_file(kind: str) -> tuple[str, ...]:
    """Those of one model type; none where its file is another than is known here."""
    top = parsed(kind)
    functions = {node.name: node for node in top if isinstance(node, ast.FunctionDef)}
    methods = forwards_of(top, [f"{kind}{part}" for part in ("DecoderLayer", *CLASSES)])
    if methods[2] is not None and HEAD_NORMS[0] in ast.dump(methods[2]):
        methods += forwards_of(top, [f"{kind}RMSNorm"] * len(HEAD_NORMS))
    nodes = [*methods, functions.get(ROTARY), functions.get(TURNED)]
    return tuple(bare(node) for node in nodes if node is not None) if all(nodes) else ()


def activation(function: Any) -> int | None:
    """The number of a feed-forward's activation, one of `ACTIVATIONS`."""
    kind = type(function)
    if kind.__name__ not in ACTIVATION_TYPES or not kind.__module__.startswith(("torch.", "transformers.")):
        return None
    # What makes two of them alike: they have no weights.
    settings = [(name, value) for name, value in vars(function).items() if not name.startswith("_")]
    alike = _Alike(function, (kind, kind.forward, kind.__call__, *settings))
    try:
        hash(alike)
    except TypeError:
        return _tried(function)
    return _tried_once(alike)


class _Alike:
    """An activation that counts as another one of the same traits."""

    def __init__(self, function: Any, traits: tuple[Any, ...]):
        self.function, self._traits = function, traits

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Alike) and self._traits == other._traits

    def __hash__(self) -> int:
        return hash(self._traits)


@functools.lru_cache(maxsize=16)
def _tried_once(alike: _Alike) -> int | None:
    return _tried(alike.function)


def forget_activations() -> None:
    """Try each again: what they run may have changed."""
    _tried_once.cache_clear()


def _tried(function: Any) -> int | None:
    values = torch.cat([torch.linspace(-9, 9, 257, device="cpu"), torch.tensor([-3e4, -40.0, 40.0, 3e4], device="cpu")])
    try:
        with torch.no_grad():
            found = function(values)
            for number, known in enumerate(ACTIVATIONS):
                if torch.allclose(found, known(values), 0, 1e-7):
                    return number
    except Exception:
        # Somebody's own, of the same name.
        return None
    return None


def is_kind(model_type: str) -> bool:
    """Whether layers of a model type are of the kind, as transformers has them."""
    return model_type in {kind.lower() for kind in KINDS}


def linears(layer: Any) -> list[Any]:
    """Those of a layer of the kind, in the order of `PROJECTIONS` and `FEED_FORWARD`."""
    # By itself a module looks for a child in three places.
    parts = ((layer._modules["self_attn"], PROJECTIONS), (layer._modules["mlp"], FEED_FORWARD))
    return [module._modules[name] for module, names in parts for name in names]


def modules_of(module: nn.Module) -> list[nn.Module]:
    """It and all that are within it, as `nn.Module.modules`, which takes ten times as long."""
    found = {module: None}
    left = [module]
    for each in left:
        # The list grows meanwhile.
        new = [child for child in each._modules.values() if child is not None and child not in found]
        left += new
        found.update(dict.fromkeys(new))
    return list(found)


def shown_to(attention: nn.Module) -> list[Recomputation]:
    """Those that keep the inputs of an attention module."""
    owners = (getattr(hook, "__self__", None) for hook in attention._forward_pre_hooks.values())
    return [owner for owner in owners if isinstance(owner, Recomputation)]


def traits(layer: Any) -> list[Any]:
    """All that `is_known` goes by, and where weights lie, read in little time: where it is the same, so is all else."""
    found: list[Any] = [nn.Linear.forward, _global_hooks()]
    for module in modules_of(layer):
        kind, own = type(module), vars(module)
        found += (module, kind, kind.forward, kind.__call__, own.get("variance_epsilon"), *module._modules)
        # The layer's own is what stands in its place.
        found.append(None if module is layer else own.get("forward"))
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            found += [
                number for number, hook in hooks.items() if not isinstance(getattr(hook, "__self__", 0), OWN_HOOKS)
            ]
        for name, weight in module._parameters.items():
            if weight is not None and type(weight) in (Tensor, nn.Parameter) and weight.layout == torch.strided:
                found += (name, type(weight), weight.data_ptr(), weight.dtype, weight.shape, weight.stride())
            else:
                found += (name, id(weight))
    if (attention := layer._modules.get("self_attn")) is not None:
        rotary = getattr(type(attention).forward, "__globals__", {}).get(ROTARY)
        found += (rotary, getattr(rotary, "__globals__", {}).get(TURNED))
        found += (vars(attention).get("head_dim"), vars(attention).get("scaling"))
    if (function := getattr(layer._modules.get("mlp"), ACTIVATION, None)) is not None:
        found.append(activation(function))
    return found


def is_known(layer: Any) -> bool:
    """Whether a decoder layer is of the kind, in a type and of shapes that the compiled calls know, as it is now."""
    children = layer._modules
    if children.keys() != set(LAYER) or None in children.values():
        return False
    attention, feed_forward = layer.self_attn._modules, layer.mlp._modules
    head_norms = attention.keys() - set(PROJECTIONS)
    if not attention.keys() >= set(PROJECTIONS) or head_norms not in (set(), set(HEAD_NORMS)):
        return False
    if feed_forward.keys() - {ACTIVATION} != set(FEED_FORWARD):
        return False
    if (
        any(_altered(module) for module in modules_of(layer)[1:])
        or _global_hooks()
        or not _is_torch_s(nn.Linear.forward)
    ):
        return False
    *inputs, output, gate, up, down = linears(layer)
    if any(type(linear) is not nn.Linear for linear in (*inputs, gate, up)):
        return False
    if any(type(linear) not in (nn.Linear, RowParallelLinear) for linear in (output, down)):
        return False
    return _codes(layer) in _known() and _fits(layer) and activation(layer.mlp.act_fn) is not None


def calls_in_turn(decoder: Any, layers: list[Any]) -> bool:
    """Whether a decoder does nothing between its layers, which are these, and nobody listens to what they give."""
    if code_of(type(decoder).forward) not in _known_decoders() or "forward" in vars(decoder):
        return False
    config = decoder.config
    return (
        list(decoder.layers) == layers
        and config.num_hidden_layers >= len(layers)
        and len({*(getattr(config, "layer_types", None) or ())}) <= 1
        and not any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
        and all(layer._compiled_call_impl is None for layer in layers)
        and all(type(layer).__call__ in (nn.Module.__call__, GradientCheckpointingLayer.__call__) for layer in layers)
        and not _global_hooks()
    )


def _altered(module: nn.Module) -> bool:
    """Whether somebody listens to a module, or has it run something else."""
    own = vars(module).get("forward")
    replaced = own is not None and not isinstance(own, FewRowsForward)
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    heard = any(not isinstance(getattr(hook, "__self__", None), OWN_HOOKS) for hook in hooks)
    return replaced or heard or type(module).__call__ is not nn.Module.__call__


@functools.lru_cache(maxsize=8)
def _is_torch_s(function: Any) -> bool:
    """Whether nobody has put another one in its place, for all modules of a class."""
    code = getattr(function, "__code__", None)
    return (
        code is not None and Path(code.co_filename).is_relative_to(TORCH_FILES) and not hasattr(function, "__wrapped__")
    )


def _global_hooks() -> bool:
    hooks = torch.nn.modules.module
    return bool(hooks._global_forward_hooks or hooks._global_forward_pre_hooks)


def _fits(layer: Any) -> bool:
    """Whether all weights are plain, of one type, on a processor, and lie as the calls read them."""
    attention = layer.self_attn
    norms = [layer.input_layernorm, layer.post_attention_layernorm]
    norms += [getattr(attention, name) for name in HEAD_NORMS if name in attention._modules]
    dim, dtype, hidden = attention.head_dim, norms[0].weight.dtype, norms[0].weight.shape[0]
    own = linears(layer)
    q, k, v, o, gate, up, down = (linear.weight for linear in own)
    shapes = [(q, None, hidden), (k, None, hidden), (v, len(k), hidden), (o, hidden, len(q)), (up, None, hidden)]
    shapes += [(gate, len(up), hidden), (down, hidden, len(up))]
    vectors = [(norm.weight, hidden) for norm in norms[:2]] + [(norm.weight, dim) for norm in norms[2:]]
    vectors += [(linear.bias, len(linear.weight)) for linear in own if linear.bias is not None]
    return (
        dtype in TYPES
        and dim % 2 == 0
        and not (len(q) % dim or len(k) % dim or (len(q) // dim) % (len(k) // dim))
        and all(isinstance(norm.variance_epsilon, float) for norm in norms)
        and isinstance(attention.scaling, float)
        and all(
            _plain(weight, dtype) and weight.dim() == 2 and weight.shape[1] == inputs and outputs in (None, len(weight))
            for weight, outputs, inputs in shapes
        )
        and all(_plain(vector, dtype) and vector.shape == (length,) for vector, length in vectors)
    )


def _plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.dtype == dtype and tensor.device.type == "cpu"
    return plain and tensor.layout == torch.strided and tensor.stride(-1) == 1 and tensor.numel() > 0
