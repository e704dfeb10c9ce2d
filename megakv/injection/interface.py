"""MegaKV's entries in transformers' interfaces: where a layer's queries, keys and values arrive, and its mask.

The mask stays a description, and is checked to be one that MegaKV honours.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from megakv.attention.latent import LatentHeads
from megakv.attention.reference import Scoring
from megakv.base.errors import MegaKVError

ATTENTION_NAME = "megakv"
ATTEND_ATTRIBUTE = "megakv_attend"
CHUNK_SIZE = "attention_chunk_size"
"""Setting of models whose tokens see no more than their own chunk in some layers (Llama 4)."""
TEMPERATURE = "attn_temperature_tuning"
"""Attribute of modules that scale queries by their place in a row, from a length on (Llama 4)."""
REFUSED_ARGUMENTS = frozenset({"position_bias", "attention_bias", "alibi", "head_mask", "block_table", "indices"})


@dataclass(frozen=True)
class CausalMask:
    """A causal mask; with a window W, a query of slot s sees the keys in ``(s - W, s]``, else those in ``[0, s]``."""

    window: int | None = None
    ndim: ClassVar[int] = 0
    """Falcon asks for it, as of a tensor that it would work on."""

    def to(self, *_: Any) -> CausalMask:
        """Itself: MPT asks for booleans."""
        return self


def describe_mask(
    *,
    mask_function: Callable[..., Any],
    local_size: int | None = None,
    config: Any = None,
    device: Any = None,
    **kwargs: Any,
) -> CausalMask:
    """Entry for transformers' `AttentionMaskInterface`: a dense mask of a sharded sequence is never built."""
    chunk = getattr(config, CHUNK_SIZE, None)
    if chunk is not None and chunk == local_size:
        # In passes over shapes it has no values. Within the first chunk, beyond which `LengthLimits` lets no sequence,
        # it is a causal one.
        if str(device) != "meta":
            _described(mask_function, local_size, device)
        return CausalMask()
    return _described(mask_function, local_size)


@functools.lru_cache(maxsize=16)
def _described(mask_function: Callable[..., Any], local_size: int | None, chunked_on: Any = None) -> CausalMask:
    """What a function of slots hides.

    It is evaluated at the edges of what `local_size` promises, so that a model with any other pattern (chunked, prefix,
    blockwise) is refused rather than silently computed wrongly. Most models have one function for all their passes.
    """
    reach = local_size or 1
    edges = sorted({0, 1, 2, 3, reach - 1, reach, reach + 1, 2 * reach, 2 * reach + 3, 8191, 8192, 8193})
    queries, keys = (torch.from_numpy(slots.reshape(-1)) for slots in np.meshgrid(edges, edges, indexing="ij"))
    if chunked_on is not None:
        queries, keys = queries.to(chunked_on), keys.to(chunked_on)
    zeros = torch.zeros_like(queries)
    try:
        seen = torch.as_tensor(mask_function(zeros, zeros, queries, keys)).expand_as(queries)
    except (IndexError, RuntimeError, TypeError) as error:
        raise MegaKVError("the model's attention mask is not a function of slots alone") from error
    expected = keys <= queries
    if chunked_on is not None:
        expected &= keys // reach == queries // reach
    elif local_size is not None:
        expected &= keys > queries - local_size
    if not torch.equal(seen.bool(), expected):
        raise MegaKVError(
            "the model's attention mask is neither causal nor a causal sliding window; "
            "MegaKV supports these two patterns only"
        )
    return CausalMask(window=local_size)


def described_mask(module: nn.Module, attention_mask: Any) -> CausalMask:
    """The mask that an attention module was given, if it is one that `describe_mask` made."""
    if not isinstance(attention_mask, CausalMask):
        raise MegaKVError(
            f"{type(module).__name__} got an attention mask ({type(attention_mask).__name__}) that did not come from "
            "transformers' mask interface; this model, or mask, is not supported"
        )
    return attention_mask


Attend = Callable[[int, Tensor, Tensor, Tensor, Scoring, Tensor | None], Tensor]
"""What hangs on every attention module of an engine's model: as `Runtime.attend`."""


def attend_of(module: nn.Module) -> Attend:
    """How an attention module attends in the engine that it was attached to."""
    attend: Attend | None = getattr(module, ATTEND_ATTRIBUTE, None)
    if attend is None:
        raise MegaKVError(
            f"{type(module).__name__} uses attention implementation {ATTENTION_NAME!r} outside a MegaKV engine; "
            "pass the model through megakv.init_inference"
        )
    return attend


class _Reached(Exception):  # noqa: N818
    """Attention was called. No error, but the way out of a module's forward: what it has by then is all that counts."""

    def __init__(self, k_BKSD: Tensor, v_BKSD: Tensor):
        super().__init__()
        self.found = k_BKSD[0], v_BKSD[0]


def _stop(layer: int, q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *_: Any) -> Tensor:
    raise _Reached(k_BKSD, v_BKSD)


def stopped_at_attention(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Keys ``[K, n, D]`` and values ``[K, n, Dv]`` with which an attention module's own code calls attention, which is
    not computed.
    """
    attend = getattr(module, ATTEND_ATTRIBUTE)
    setattr(module, ATTEND_ATTRIBUTE, _stop)
    try:
        module.forward(*args, **kwargs)
    except _Reached as reached:
        return reached.found
    finally:
        setattr(module, ATTEND_ATTRIBUTE, attend)
    raise ValueError(f"{type(module).__name__} returned without calling attention")


def attention_function(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Entry for transformers' `AttentionInterface`: ``[1, L, H, Dv]``, and None for the weights.

    It is given ``[1, H, L, D]``, ``[1, K, L, D]`` and ``[1, K, L, Dv]`` of this rank's packed tokens, after rotary.
    """
    mask = described_mask(module, attention_mask)
    # As transformers' own functions take it where they are given no mask.
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if dropout or is_causal is False or not REFUSED_ARGUMENTS.isdisjoint(kwargs):
        refused = sorted(name for name in REFUSED_ARGUMENTS if kwargs.get(name) is not None)
        if dropout:
            refused.append("dropout")
        if is_causal is False:
            refused.append("is_causal=False")
        if refused:
            raise MegaKVError(
                f"{type(module).__name__} passes {', '.join(refused)} to attention, which MegaKV does not support"
            )
    scoring = scoring_of(query.shape[-1] ** -0.5 if scaling is None else scaling, mask.window, softcap)
    if keeps_latents(module):
        scoring = replace(scoring, latent=latent_heads(module, query))
    layer: Any = module.layer_idx
    return attend_of(module)(layer, query, key, value, scoring, s_aux), None


@functools.lru_cache(maxsize=64)
def scoring_of(scale: float, window: int | None, softcap: float | None) -> Scoring:
    """How a layer scores: one for all layers that do alike."""
    return Scoring(scale, window, softcap)


# Latents (MLA): modules that are to expand what transformers caches of a token into keys and values of all heads


EXPANSION = "expand_kv"
"""Their method for it, in all of transformers' families that have latents."""


def latent_rows(latents: Tensor, rotated: Tensor) -> tuple[Tensor, Tensor]:
    """In the place of it: ``[1, 1, L, R]`` and ``[1, 1, L, P]`` as keys of one head, and values without columns."""
    return torch.cat((latents, rotated), dim=-1), latents.new_empty((*latents.shape[:-1], 0))


def keeps_latents(module: nn.Module) -> bool:
    """Whether an attention module leaves the expansion of its latents to MegaKV."""
    return EXPANSION in vars(module)


def latent_heads(module: Any, query: Tensor) -> LatentHeads:
    """The heads of an attention module that are on this rank, and how they see latents."""
    return LatentHeads(module.kv_b_proj.weight, query.shape[1], module.qk_nope_head_dim)
