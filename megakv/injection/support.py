"""What MegaKV can serve: checked on a model without weights, before any are read, in a pass over shapes.

In it, on the meta device, every layer's own code runs, and only shapes come out.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from megakv.attention.reference import Scoring
from megakv.base.errors import MegaKVError
from megakv.cache.cache import ShardedCache
from megakv.distributed.layouts import balanced
from megakv.distributed.sharding import TokenBlock
from megakv.injection.interface import Attend
from megakv.injection.ownership import attach
from megakv.injection.policy import policy_for, takes_positions
from megakv.weights.placement.attention import attention_modules
from megakv.weights.placement.plan import is_experts
from megakv.weights.text_part import leave_other_senses

INPUTS = ("input_ids", "attention_mask", "past_key_values")
MIXERS = (nn.modules.conv._ConvNd, nn.RNNBase)
"""Modules that carry something from one token to the next."""
STATES = ("past_key_values", "past_key_value", "layer_past", "cache_params")
"""Arguments through which modules are given what earlier tokens left."""


def check_support(family: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    """Refuse a model whose decoder layers are not each one attention, and else token by token.

    A model of the class is built without memory and run over shapes: the masks that it asks for, what it tells
    attention and what it asks of its cache are then what they will be. The config is left as it is.
    """
    with init_empty_weights(include_buffers=False), no_init_weights():
        # An instance that an engine used before has a name in its config that only MegaKV knows.
        model = family._from_config(deepcopy(config), dtype=torch.bfloat16, attn_implementation="eager").eval()
    leave_other_senses(model)
    checks = (_no_language_model, _unknown_inputs, _other_mixers, _unknown_attention, _uncounted)
    reason = next(filter(None, (check(model) for check in checks)), None)
    if reason is not None:
        raise ValueError(f"model type {config.model_type!r} ({family.__name__}) is not supported: {reason}")


def _no_language_model(model: PreTrainedModel) -> str | None:
    return None if model.can_generate() else "it generates no text; load the model by AutoModelForCausalLM"


def _unknown_inputs(model: PreTrainedModel) -> str | None:
    """What a model must be given and does not take."""
    taken = inspect.signature(type(model).forward).parameters
    missing = [name for name in INPUTS if name not in taken]
    if _count(model) == 0:
        return "its config names no number of hidden layers"
    if policy_for(model.config.model_type).substitute is None and not takes_positions(model):
        missing.append("position_ids")
    return f"its forward takes no {' and no '.join(missing)}" if missing else None


def _count(model: PreTrainedModel) -> int:
    return getattr(model.config.get_text_config(decoder=True), "num_hidden_layers", 0)


def _other_mixers(model: PreTrainedModel) -> str | None:
    """What besides attention lets tokens of a decoder layer see each other."""
    lists = (module for module in model.get_decoder().modules() if isinstance(module, nn.ModuleList))
    layers = next((found for found in lists if len(found) == _count(model)), nn.ModuleList())
    for index, layer in enumerate(layers):
        attention = {id(module) for module in attention_modules(layer)}
        if not attention:
            return f"decoder layer {index} ({type(layer).__name__}) has no attention that MegaKV knows"
        for module in layer.modules():
            name = type(module).__name__
            if isinstance(module, MIXERS):
                return f"{name} in decoder layer {index} mixes tokens beside attention"
            around = any(id(inner) in attention for inner in module.modules())
            if not around and set(STATES) & inspect.signature(type(module).forward).parameters.keys():
                return f"{name} in decoder layer {index} keeps a state of its own beside attention"
    return None


def _unknown_attention(model: PreTrainedModel) -> str | None:
    """Why attention cannot be found in so many layers as the config names."""
    known, count = len({module.layer_idx for module in attention_modules(model)}), _count(model)
    return f"MegaKV finds attention in {known} of the {count} layers that its config names" if known < count else None


def _uncounted(model: PreTrainedModel) -> str | None:
    """Why the layers do not attend exactly once each, as MegaKV attends."""
    calls, expected = Counter[int](), range(_count(model))

    def attend(layer: int, q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, scoring: Scoring, *_: Any) -> Tensor:
        calls[layer] += 1
        return q_BHSD.new_empty((1, q_BHSD.shape[2], q_BHSD.shape[1], scoring.value_dim(v_BKSD)))

    try:
        shape_pass(model, attend, tokens=5)
    except MegaKVError as error:
        return str(error)
    except Exception as error:
        if not (isinstance(error, NotImplementedError) or "meta tensor" in str(error)):
            return f"its forward pass fails with MegaKV's attention and cache ({type(error).__name__}: {error})"
        # It ended for want of values only, by which some experts are chosen. Layers of a class that called are alike.
        modules = attention_modules(model)
        seen = {type(module) for module in modules if calls[module.layer_idx]}
        for layer in {module.layer_idx for module in modules if type(module) in seen} - calls.keys():
            calls[layer] = 1
    silent = [layer for layer in expected if not calls[layer]]
    if silent:
        listed = ", ".join(map(str, silent[:8])) + (", ..." if len(silent) > 8 else "")
        return f"decoder layers {listed} of {len(expected)} do not use transformers' attention interface"
    if calls.keys() - set(expected) or max(calls.values()) > 1:
        return f"attention is called {calls.total()} times for {len(expected)} decoder layers"
    return None


def shape_pass(model: PreTrainedModel, attend: Attend, tokens: int) -> tuple[int, Tensor]:
    """Run a model over one packed row; returns how many attention layers a cache has for it, and its logits.

    The model's parameters are on the meta device. Its buffers follow them there, and it is switched to this attention,
    which is called with tensors that have no values.
    """
    for module in model.modules():
        # The code of rotary embeddings looks at values.
        if not hasattr(module, "rope_type"):
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to("meta")
    if any(is_experts(module) for module in model.modules()):
        # Of the ways to compute experts the one that asks for no tokens' values and no alignment.
        model.set_experts_implementation("batched_mm")
    # Some models look for padding among the tokens, to warn of it; not every config takes None for an answer.
    vars(model.config)["pad_token_id"] = None
    layers = attach(model, attend)
    cache = ShardedCache(layers, size=1, rank=0)
    slots = np.arange(tokens, dtype=np.int64)
    cache.begin(balanced(TokenBlock(np.zeros_like(slots), slots, slots, 1), 1), 1)
    row = torch.empty(1, tokens, dtype=torch.int64, device="meta")
    inputs: dict[str, Any] = {
        "input_ids": row,
        "position_ids": row,
        "past_key_values": cache,
        "use_cache": True,
        "return_dict": True,
        "logits_to_keep": row[0, :1],
    }
    known = {*inspect.signature(type(model).forward).parameters, *(["position_ids"] if takes_positions(model) else [])}
    with torch.no_grad(), _rotary_on_cpu(model, tokens):
        return layers, model(**{name: value for name, value in inputs.items() if name in known}).logits


@contextmanager
def _rotary_on_cpu(model: nn.Module, tokens: int) -> Iterator[None]:
    """Let rotary embeddings compute real angles of real positions, of which only shapes go on."""
    positions = torch.arange(tokens).unsqueeze(0)

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        def real(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return positions if value.dtype == torch.int64 else torch.empty(0, dtype=value.dtype)

        return tuple(map(real, args)), {name: real(value) for name, value in kwargs.items()}

    def leave(module: nn.Module, args: Any, output: Any) -> Any:
        return tuple(part.to("meta") for part in output) if isinstance(output, tuple) else output.to("meta")

    handles = []
    for module in model.modules():
        if hasattr(module, "rope_type"):
            handles += [module.register_forward_pre_hook(enter, with_kwargs=True), module.register_forward_hook(leave)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
