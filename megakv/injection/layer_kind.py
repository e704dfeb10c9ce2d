"""Decoder layers of the Llama kind: of one of transformers' own classes, with known settings, and nobody's hooks.

A probe, a few made-up rows by the layer's own code and by compiled calls, can only say no.
"""

from __future__ import annotations

import copy
import functools
import inspect
import operator
import sys
from collections import OrderedDict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from megakv.attention.layer import TOLERANCE, LayerCalls
from megakv.base.library import TYPES
from megakv.forward.last_layer import LastLayerRows
from megakv.injection.interface import ATTEND_ATTRIBUTE, CausalMask, scoring_of
from megakv.injection.linears import FewRowsForward, all_reduce_of
from megakv.injection.prompt_layer import PromptLayer
from megakv.injection.recomputation import Recomputation
from megakv.weights.blocks import BLOCKS
from megakv.weights.packed_linear import PackedLinear
from megakv.weights.placement.attention import SEPARATE
from megakv.weights.tensor_parallel import RowParallelLinear

KINDS = {
    "llama": "Llama", "mistral": "Mistral", "ministral": "Ministral", "cwm": "Cwm", "qwen2": "Qwen2", "qwen3": "Qwen3",
    "qwen2_moe": "Qwen2Moe", "qwen3_moe": "Qwen3Moe",
}  # fmt: skip
"""Names that classes of a model type begin with; of those with experts, layers that have none."""
IN_TURN = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose decoders give all layers the same inputs, but for what one layer gives the next."""
MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
PROJECTIONS = (*SEPARATE, "o_proj")
HEAD_NORMS = ("q_norm", "k_norm")
FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
LINEARS = nn.Linear, RowParallelLinear, PackedLinear
ACTIVATION = "act_fn"
ACTIVATIONS = {"SiLU": 0, "SiLUActivation": 0, "GELUActivation": 1, "GELUTanh": 2}
"""Numbers in `megakv.attention.layer.ACTIVATIONS`."""
ROTARY = ("apply_rotary_pos_emb", "rotate_half")
SETTINGS = {
    "config", "layer_idx", "layer_type", "head_dim", "num_key_value_groups", "scaling", "attention_dropout",
    "is_causal", "sliding_window", "_is_hf_initialized", "head_shard", ATTEND_ATTRIBUTE, *vars(nn.Module()),
}  # fmt: skip
"""Attributes of attention modules of which it is known what they do."""
OWN_HOOKS = LastLayerRows, Recomputation
"""Those that leave out rows of prompts do nothing where all rows are wanted, and inputs are shown by whoever calls."""
OWN_FILES = tuple(f"{Path(package.__file__ or '').parent}/" for package in (torch, transformers))
PROBED_POSITIONS, PROBED_WINDOW = (0, 5, 8192, 131_071), 3


def is_kind(model_type: str) -> bool:
    """Whether layers of a model type are of the kind, as transformers has them."""
    return model_type in IN_TURN


def linears(layer: Any) -> list[Any]:
    """Those of a layer of the kind, in the order of `PROJECTIONS` and `FEED_FORWARD`."""
    parts = ((layer._modules["self_attn"], PROJECTIONS), (layer._modules["mlp"], FEED_FORWARD))
    return [module._modules[name] for module, names in parts for name in names]


def shown_to(attention: nn.Module) -> list[Recomputation]:
    """Those that keep the inputs of an attention module."""
    owners = (getattr(hook, "__self__", None) for hook in attention._forward_pre_hooks.values())
    return [owner for owner in owners if isinstance(owner, Recomputation)]


def heard(modules: Iterable[nn.Module]) -> bool:
    """Whether somebody but MegaKV listens to a module, or to all there are."""
    hooks = [hooks for module in modules for hooks in (module._forward_hooks, module._forward_pre_hooks)]
    hooks += [torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks]
    return any(not isinstance(getattr(hook, "__self__", None), OWN_HOOKS) for each in hooks for hook in each.values())


def _is_own(function: Any) -> bool:
    """Whether a function, and whatever is around it, is in files of PyTorch or transformers."""
    while hasattr(function, "__wrapped__"):
        if not function.__code__.co_filename.startswith(OWN_FILES):
            return False
        function = function.__wrapped__
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    return file.startswith(OWN_FILES) and file == getattr(sys.modules.get(function.__module__), "__file__", None)


@functools.lru_cache(maxsize=256)
def _named(kind: Any, forward: Any, call: Any) -> tuple[str, str]:
    """A class's module and name, if it is the one that its file has, and runs what it has there."""
    own = getattr(sys.modules.get(kind.__module__), kind.__name__, None) is kind
    known = own and _is_own(forward) and _is_own(call)
    return (kind.__module__, kind.__name__) if known else ("", "")


def class_of(module: nn.Module) -> tuple[str, str]:
    """See `_named`; two empty texts where the module's class, or what it runs, is somebody's own."""
    kind: Any = type(module)
    return _named(kind, kind.forward, kind.__call__)


def activation(function: Any) -> int | None:
    """The number of a feed-forward's activation; None of any other function."""
    module, name = class_of(function) if isinstance(function, nn.Module) else ("", "")
    return ACTIVATIONS.get(name) if module.startswith(("torch.", "transformers.")) else None


def settings(layer: Any) -> tuple[Any, ...] | None:
    """What a layer's code goes by, beside the values of weights, as it is now; None of a layer of any other kind."""
    file, name = class_of(layer)
    family = KINDS.get(file.split(".")[2], "") if file.startswith("transformers.models.") else ""
    children = layer._modules
    attention, feed_forward = children.get("self_attn"), children.get("mlp")
    if not family or name != f"{family}DecoderLayer" or attention is None or feed_forward is None:
        return None
    names = attention._modules.keys() - {*PROJECTIONS}
    kinds = {"": "DecoderLayer", "self_attn": "Attention", "mlp": "MLP"}
    kinds |= dict.fromkeys(("input_layernorm", "post_attention_layernorm"), "RMSNorm")
    kinds |= dict.fromkeys((f"self_attn.{head_norm}" for head_norm in names), "RMSNorm")
    modules = dict(layer.named_modules())
    expected = {*kinds, f"mlp.{ACTIVATION}"}
    expected |= {f"self_attn.{each}" for each in PROJECTIONS} | {f"mlp.{each}" for each in FEED_FORWARD}
    if modules.keys() != expected or names not in (set(), {*HEAD_NORMS}):
        return None
    if any(class_of(modules[path]) != (file, f"{family}{kind}") for path, kind in kinds.items()):
        return None
    inside = [module for module in modules.values() if module is not layer]
    replaced = (vars(module).get("forward") for module in inside)
    if heard(inside) or any(own is not None and not isinstance(own, FewRowsForward) for own in replaced):
        return None
    *inputs, output, gate, up, down = own = linears(layer)
    linear = bool(_named(nn.Linear, nn.Linear.forward, nn.Linear.__call__)[0])
    whole = all(type(each) in (nn.Linear, PackedLinear) for each in (*inputs, gate, up))
    if not (linear and whole and all(type(each) in LINEARS for each in (output, down))):
        return None
    function, scope = feed_forward._modules[ACTIVATION], _scope(type(attention).forward)
    rotary = [scope.get(each) for each in ROTARY]
    known = activation(function) is not None and all(map(_is_own, rotary)) and vars(attention).keys() <= SETTINGS
    if not known or not _fits(attention, modules, own):
        return None
    eps = [module.variance_epsilon for module in modules.values() if hasattr(module, "variance_epsilon")]
    shapes = [
        (each.weight.shape, each.bias is None, all_reduce_of(each) is None, getattr(each, "kind", "")) for each in own
    ]
    scale = attention.scaling, attention.head_dim
    code = [type(module).forward for module in modules.values()]
    return *code, *rotary, vars(function).get("act"), *scale, *eps, modules["input_layernorm"].weight.dtype, *shapes


class LayerState:
    """All that a layer's `settings` follow from, and where its weights lie, as they are now.

    Where two states are the same, so are settings. It takes a fifth of their time, and every prompt asks for it.
    """

    def __init__(self, layer: Any):
        found: list[Any] = [*torch_module._global_forward_hooks.values()]
        found += torch_module._global_forward_pre_hooks.values()
        self.places = list[Any]()
        """Of weights."""
        modules = [layer]
        for module in modules:
            own, kind = vars(module), type(module)
            found += (kind, kind.forward, kind.__call__, *own.values())
            for name in ("_modules", "_parameters", "_forward_hooks", "_forward_pre_hooks"):
                found += own[name].values()
            self.places += [
                (each.data_ptr(), each.shape, each.stride()) for each in own["_parameters"].values() if each is not None
            ]
            modules += filter(None, own["_modules"].values())
        if (attention := layer._modules.get("self_attn")) is not None:
            scope = _scope(type(attention).forward)
            found += (scope.get(each) for each in ROTARY)
        # They are held: no other object can be where one of them was.
        self._found = found

    def same(self, other: LayerState) -> bool:
        """Whether both are of the same objects, and weights lie where they did."""
        mine, theirs = self._found, other._found
        return len(mine) == len(theirs) and all(map(operator.is_, mine, theirs)) and self.places == other.places


@functools.lru_cache(maxsize=256)
def _scope(forward: Any) -> dict[str, Any]:
    """Names that a function's code knows."""
    scope: dict[str, Any] = inspect.unwrap(forward).__globals__
    return scope


def calls_in_turn(decoder: Any, layers: list[Any]) -> bool:
    """Whether a decoder does nothing between its layers, which are these, and nobody listens to what they give."""
    file, name = class_of(decoder)
    families = {f"transformers.models.{kind}.modeling_{kind}": f"{KINDS[kind]}Model" for kind in IN_TURN}
    if not name or families.get(file) != name or "forward" in vars(decoder):
        return False
    config = decoder.config
    return (
        list(decoder.layers) == layers
        and config.num_hidden_layers >= len(layers)
        and len({*(getattr(config, "layer_types", None) or ())}) <= 1
        and not heard(layers)
        and all(layer._compiled_call_impl is None and class_of(layer)[0] for layer in layers)
    )


def _fits(attention: Any, modules: dict[str, Any], own: list[Any]) -> bool:
    """Whether all weights are plain, of one type, on a processor, and lie as the calls read them."""
    norms = [modules["input_layernorm"], modules["post_attention_layernorm"]]
    norms += [attention._modules[name] for name in HEAD_NORMS if name in attention._modules]
    dim, dtype, hidden = attention.head_dim, norms[0].weight.dtype, norms[0].weight.shape[0]
    q, k, v, o, gate, up, down = (linear.weight for linear in own)
    outputs = None, None, len(k), hidden, len(up), None, hidden
    inputs = hidden, hidden, hidden, len(q), hidden, hidden, len(up)
    vectors = [(norm.weight, hidden) for norm in norms[:2]] + [(norm.weight, dim) for norm in norms[2:]]
    vectors += [(linear.bias, len(linear.weight)) for linear in own if linear.bias is not None]
    return (
        dtype in TYPES
        and dim % 2 == 0
        and not (len(q) % dim or len(k) % dim or (len(q) // dim) % (len(k) // dim))
        and all(isinstance(norm.variance_epsilon, float) for norm in norms)
        and isinstance(attention.scaling, float)
        and all(
            _plain(linear.weight, torch.uint8 if isinstance(linear, PackedLinear) else dtype)
            and linear.weight.dim() == 2
            and linear.weight.shape[1] == _row(linear, columns)
            and rows in (None, len(linear.weight))
            for linear, rows, columns in zip(own, outputs, inputs, strict=True)
        )
        and all(_plain(vector, dtype) and vector.shape == (length,) for vector, length in vectors)
    )


def _row(linear: nn.Linear, columns: int) -> int:
    """Elements of a row of a weight for so many inputs, or bytes in blocks; -1 where it is for others."""
    if not isinstance(linear, PackedLinear):
        return columns
    return BLOCKS[linear.kind].row_bytes(columns) if columns == linear.in_features else -1


def _plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.dtype == dtype and tensor.device.type == "cpu"
    return plain and tensor.layout == torch.strided and tensor.stride(-1) == 1 and tensor.numel() > 0


def _apart(module: nn.Module) -> nn.Module:
    """A module of the same class, weights and settings, to which nobody listens, and in which nothing is replaced."""
    own = copy.copy(module)
    vars(own).pop("forward", None)
    children = OrderedDict((name, child and _apart(child)) for name, child in module._modules.items())
    vars(own).update(_modules=children, _forward_hooks=OrderedDict(), _forward_pre_hooks=OrderedDict())
    return own


def agrees(layer: Any, calls: LayerCalls, prompt: PromptLayer) -> bool:
    """Whether compiled calls make of a few rows what the layer's own code does, at long positions and with a window.

    So it is with those for prompts. A layer whose linears are summed over tensor-parallel ranks is compared up to its
    attention.
    """
    attention, generator, dim = layer.self_attn, torch.Generator("cpu").manual_seed(0), layer.self_attn.head_dim
    heads, rows, found = calls.weights.heads, len(PROBED_POSITIONS), list[Any]()

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cpu").to(calls.dtype)

    def attend(_layer: int, *given: Any) -> Tensor:
        found.extend(given)
        return attended

    x, attended = drawn(1, rows, calls.hidden), drawn(1, rows, heads, dim)
    positions = torch.tensor([PROBED_POSITIONS], device="cpu")
    angles = positions[..., None] * 10_000.0 ** -(torch.arange(dim, device="cpu") % (dim // 2) * 2 / dim)
    cos, sin = angles.cos().to(calls.dtype), angles.sin().to(calls.dtype)
    given = {"attention_mask": CausalMask(PROBED_WINDOW), "position_ids": positions, "position_embeddings": (cos, sin)}
    own: Any = _apart(layer)
    setattr(own.self_attn, ATTEND_ATTRIBUTE, attend)
    summed = any(all_reduce_of(each) is not None for each in linears(layer))
    mine = [calls.project(x, cos, sin, whole=True), prompt.project(x, cos, sin)]
    results = [calls.heads(packed) for packed in mine]
    try:
        with torch.no_grad():
            if summed:
                own.self_attn.o_proj = nn.Identity()
                own.self_attn(own.input_layernorm(x), **given)
            else:
                found.append(type(layer).forward(own, x, **given))
                results[0].append(calls.feed_forward(x, attended, projected=False, whole=True)[1])
                results[1].append(prompt.outputs(x, attended.flatten(2), (None, None)))
    except Exception:
        # Its code is of another version than those that are known here.
        return False
    q, k, v, scoring, sinks, *out = found
    if scoring != scoring_of(attention.scaling, PROBED_WINDOW, None) or sinks is not None:
        return False
    pairs = [pair for result in results for pair in zip((q, k, v, *out), result, strict=True)]
    bound = 4 * TOLERANCE[calls.dtype]
    return all(bool((one - two).abs().max() <= bound * one.abs().max()) for one, two in pairs)


def settings_of(module: nn.Module) -> tuple[Any, ...]:
    """What its code may go by that is no tensor: numbers and texts among its attributes, and its own `forward`."""
    own = {name: value for name, value in vars(module).items() if name not in MODULE_ATTRIBUTES}
    return module.training, own.get("forward"), plain_values(own)


def plain_values(value: Any) -> Any:
    """Numbers and texts, in whatever containers; None in the place of all else."""
    if isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, dict):
        return [(str(key), found) for key, each in value.items() if (found := plain_values(each)) is not None]
    return [plain_values(each) for each in value] if isinstance(value, list | tuple) else None
