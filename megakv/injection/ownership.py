"""A model that is given to an engine: what the engine changes of it, and gives back."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel

from megakv.injection.families import restore_attention, substitute_attention
from megakv.injection.interface import (
    ATTEND_ATTRIBUTE,
    ATTENTION_NAME,
    EXPANSION,
    TEMPERATURE,
    Attend,
    attention_function,
    describe_mask,
    keeps_latents,
    latent_rows,
)
from megakv.injection.policy import policy_for
from megakv.weights.placement.attention import attention_modules
from megakv.weights.quantised import is_plain_linear

SPENT_ATTRIBUTE = "megakv_spent"
"""On a model of which no other engine, nor anybody else, can make use: the setting that changed its weights."""


def check_unused(model: PreTrainedModel) -> None:
    """Refuse a model that an engine has, or whose weights one has changed."""
    if any(hasattr(module, ATTEND_ATTRIBUTE) for module in model.modules()):
        raise ValueError(
            f"the model given ({type(model).__name__}) belongs to another engine: call destroy() of that one first, or "
            "load the model a second time"
        )
    spent = getattr(model, SPENT_ATTRIBUTE, None)
    if spent is not None:
        raise ValueError(
            f"the model given ({type(model).__name__}) was changed for good by an earlier engine with {spent}: load it "
            "again, or give init_inference its folder"
        )


@contextmanager
def own_config(model: PreTrainedModel) -> Iterator[None]:
    """Give a model a config of its own for a while: it may be another model's too, and must not change under that."""
    copies: dict[int, Any] = {}
    changed: list[tuple[nn.Module, str, PreTrainedConfig]] = []
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, PreTrainedConfig):
                changed.append((module, name, value))
                # One copy of each, also of those within others.
                setattr(module, name, copy.deepcopy(value, copies))
    try:
        yield
    finally:
        for module, name, value in changed:
            setattr(module, name, value)


def attach(model: PreTrainedModel, attend: Attend) -> int:
    """Switch a model instance to MegaKV's attention; returns how many attention layers it has.

    Its weights must be there, and cut for tensor parallelism. Modules with latents are given a way to hand them over.
    """
    AttentionInterface.register(ATTENTION_NAME, attention_function)
    AttentionMaskInterface.register(ATTENTION_NAME, describe_mask)
    kind = policy_for(model.config.model_type).substitution()
    if kind is None:
        model.set_attn_implementation(ATTENTION_NAME)
    else:
        substitute_attention(model, kind)
        # The model only takes its mask by this name; set_attn_implementation would refuse it.
        model.config._attn_implementation = ATTENTION_NAME
    modules = attention_modules(model)
    for module in modules:
        setattr(module, ATTEND_ATTRIBUTE, attend)
        if getattr(module, TEMPERATURE, False):
            # Places in a packed row are no positions. Up to the length that `LengthLimits` allows nothing is scaled.
            setattr(module, TEMPERATURE, None)
        # Quantised ones expand theirs as they do.
        if hasattr(module, EXPANSION) and is_plain_linear(module.kv_b_proj):
            setattr(module, EXPANSION, latent_rows)
    return max((module.layer_idx + 1 for module in modules), default=0)


def detach(model: PreTrainedModel) -> None:
    """Take back what `attach` did to a model's modules."""
    for module in model.modules():
        restore_attention(module)
        if keeps_latents(module):
            delattr(module, EXPANSION)
        if hasattr(module, ATTEND_ATTRIBUTE):
            delattr(module, ATTEND_ATTRIBUTE)
        if getattr(module, TEMPERATURE, False) is None:
            setattr(module, TEMPERATURE, True)
