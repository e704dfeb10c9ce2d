"""What MegaKV can serve: checked on a model without weights, before any are read."""

from __future__ import annotations

import inspect
from collections import Counter
from copy import deepcopy

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from megakv.attention.reference import Scoring
from megakv.errors import MegaKVError
from megakv.injection.interface import attention_modules
from megakv.injection.policy import policy_for, takes_positions
from megakv.injection.shape_pass import shape_pass

INPUTS = ("input_ids", "attention_mask", "past_key_values")
MIXERS = (nn.modules.conv._ConvNd, nn.RNNBase)
"""Modules that carry something from one token to the next."""
STATES = ("past_key_values", "past_key_value", "layer_past", "cache_params")
"""Arguments through which modules are given what earlier tokens left."""


class _Calls:
    """Attention that counts how often each layer calls it."""

    def __init__(self) -> None:
        self.of: Counter[int] = Counter()

    def attend(
        self, layer: int, q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, scoring: Scoring, sinks: Tensor | None
    ) -> Tensor:
        """``[1, L, H, Dv]`` without values."""
        self.of[layer] += 1
        return q_BHSD.new_empty((1, q_BHSD.shape[2], q_BHSD.shape[1], v_BKSD.shape[3]))


def check_support(family: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    """Refuse a model whose decoder layers are not each one attention, and else token by token.

    A model of the class is built without memory and run over shapes: the masks that it asks for, what it tells
    attention and what it asks of its cache are then what they will be. The config is left as it is.
    """
    with init_empty_weights(include_buffers=False), no_init_weights():
        # An instance that an engine used before has a name in its config that only MegaKV knows.
        model = family._from_config(deepcopy(config), dtype=torch.bfloat16, attn_implementation="eager").eval()
    reason = _unknown_inputs(model) or _other_mixers(model) or _uncounted(model)
    if reason is not None:
        raise ValueError(f"model type {config.model_type!r} ({family.__name__}) is not supported: {reason}")


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


def _uncounted(model: PreTrainedModel) -> str | None:
    """Why the layers do not attend exactly once each, as MegaKV attends."""
    calls = _Calls()
    expected = range(_count(model))
    try:
        shape_pass(model, calls, tokens=5)
    except MegaKVError as error:
        return str(error)
    except Exception as error:
        if not (isinstance(error, NotImplementedError) or "meta tensor" in str(error)):
            return f"its forward pass fails with MegaKV's attention and cache ({type(error).__name__}: {error})"
        # It ended for want of values only, by which some experts are chosen. Layers of a class that called are alike.
        modules = attention_modules(model)
        seen = {type(module) for module in modules if calls.of[module.layer_idx]}
        for layer in {module.layer_idx for module in modules if type(module) in seen} - calls.of.keys():
            calls.of[layer] = 1
    silent = [layer for layer in expected if not calls.of[layer]]
    if silent:
        listed = ", ".join(map(str, silent[:8])) + (", ..." if len(silent) > 8 else "")
        return f"decoder layers {listed} of {len(expected)} do not use transformers' attention interface"
    if calls.of.keys() - set(expected) or max(calls.of.values()) > 1:
        return f"attention is called {calls.of.total()} times for {len(expected)} decoder layers"
    return None
