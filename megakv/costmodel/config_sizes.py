"""What a model's config says of its sizes, whatever its family calls it."""

from __future__ import annotations

from typing import Any

FEED_FORWARD_NAMES = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")
EXPANSION = 4
"""The feed-forward's width over the hidden one where a config does not say: BLOOM, GPT-2, GPT-J, MPT."""


def head_dims(text: Any, heads: int) -> tuple[int, int]:
    if getattr(text, "qk_nope_head_dim", None) is not None:
        return text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim
    dim = getattr(text, "head_dim", None) or text.hidden_size // heads
    return dim, dim


def kept_rotary(text: Any, key_dim: int) -> int:
    """Sines and cosines of a token where their frequencies follow the length."""
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = [each.get("rope_type", "") for each in (rope, *rope.values()) if isinstance(each, dict)]
    width = getattr(text, "qk_rope_head_dim", None) or int(key_dim * (rope.get("partial_rotary_factor") or 1))
    return 2 * width if any("dynamic" in kind or kind == "longrope" for kind in kinds) else 0


def feed_forward_width(text: Any, *, experts: bool) -> int:
    """Width of the feed-forward; of one of its experts where it has several."""
    names = ("moe_intermediate_size", *FEED_FORWARD_NAMES) if experts else FEED_FORWARD_NAMES
    for name in names:
        found = getattr(text, name, None)
        if found:
            return int(max(found) if isinstance(found, list | tuple) else found)
    return EXPANSION * int(text.hidden_size)


def biased(text: Any) -> bool:
    """Whether scores are changed before the softmax, which keeps fused kernels out."""
    alibi = getattr(text, "alibi", False) or text.model_type in ("bloom", "mpt")
    return bool(alibi or getattr(text, "attn_logit_softcapping", None))


def windows(text: Any, n_layers: int) -> list[int | None]:
    window = getattr(text, "sliding_window", None)
    if not isinstance(window, int) or getattr(text, "use_sliding_window", True) is False:
        return [None] * n_layers
    kinds = getattr(text, "layer_types", None) or ["sliding_attention"] * n_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def experts(text: Any) -> tuple[int, int]:
    """Routed experts of a layer, and how many a token uses; 1 and 1 without any."""
    count = getattr(text, "num_local_experts", None) or getattr(text, "n_routed_experts", None)
    count = count or getattr(text, "num_experts", None) or 1
    return count, getattr(text, "num_experts_per_tok", None) or 1


def positions(text: Any) -> int | None:
    """Tokens that a sequence may have, the answer included; None where the config does not say."""
    found = getattr(text, "max_position_embeddings", None) or getattr(text, "max_seq_len", None)
    rope = getattr(text, "rope_parameters", None) or {}
    # Dynamic NTK's frequencies stretch beyond the original length, which the config names, by its factor.
    factor = rope.get("factor") if rope.get("rope_type") == "dynamic" else None
    return None if found is None else int(found * (factor or 1))
