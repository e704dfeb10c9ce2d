"""Families whose attention bypasses transformers' interface: how each makes queries, keys, values and biases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.bloom.modeling_bloom import BloomAttention
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as build_bloom_alibi
from transformers.models.falcon.modeling_falcon import FalconAttention
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb as rotate_falcon
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as build_falcon_alibi
from transformers.models.gptj.modeling_gptj import GPTJAttention
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as rotate_gptj
from transformers.models.mpt.modeling_mpt import MptAttention, build_mpt_alibi_tensor

from megakv.attention.reference import Scoring
from megakv.injection.substitution import Projected, SubstitutedAttention


class ShardedBloomAttention(SubstitutedAttention):
    """ALiBi, queries, keys and values fused per head; the residual is added inside the module."""

    family = BloomAttention
    output = "dense"

    def __init__(self, original: nn.Module, config: Any):
        super().__init__(original, config)
        self._slopes = self.local(_slopes(build_bloom_alibi, config.num_attention_heads, torch.float32))

    @classmethod
    def check(cls, config: Any) -> None:
        """Refuse products in slices, in the order of Megatron's ranks."""
        if config.slow_but_exact and config.pretraining_tp > 1:
            raise ValueError(
                "slow_but_exact = True is not supported with MegaKV; set it to false in the model's config"
            )

    def project(self, hidden_states: Tensor, inputs: dict[str, Any]) -> Projected:
        fused = self.child("query_key_value")(hidden_states)
        query, key, value = split_groups(fused, heads=len(self._slopes), head_dim=self.head_dim)
        return query, key, value, Scoring(self.head_dim**-0.5, alibi_slopes=self._slopes)


class ShardedFalconAttention(SubstitutedAttention):
    """Rotary or ALiBi; grouped (40B), single (7B) or separate (RW) KV heads in one fused projection.

    Equal to transformers' default (``sdpa``) attention of the family. Its ``eager`` one adds ALiBi twice.
    """

    family = FalconAttention
    output = "dense"

    def __init__(self, original: nn.Module, config: Any):
        super().__init__(original, config)
        self._slopes: Tensor | None = None
        if config.alibi:
            self._slopes = self.local(_slopes(build_falcon_alibi, config.num_attention_heads, torch.bfloat16))

    def project(self, hidden_states: Tensor, inputs: dict[str, Any]) -> Projected:
        heads = self.child("dense").weight.shape[1] // self.head_dim
        fused = self.child("query_key_value")(hidden_states)
        query, key, value = split_groups(fused, heads=heads, head_dim=self.head_dim)
        if self._slopes is None:
            query, key = rotate_falcon(query, key, *inputs["position_embeddings"])
        else:
            group = heads // key.shape[1]
            if group > 1:
                key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
            # Products rounded to bfloat16, also in a float32 model: from position 256 on they grow in steps, so slopes
            # alone cannot give them. They enter through one more column of queries and keys, which every kernel, the
            # cache and the ring carry without knowing.
            bias_HS = (self._slopes[:, None] * inputs["position_ids"][0]).to(key.dtype)
            ones = query.new_ones((*query.shape[:-1], 1))
            query, key = torch.cat((query, ones), dim=-1), torch.cat((key, bias_HS[None, :, :, None]), dim=-1)
        return query, key, value, Scoring(self.head_dim**-0.5)


class ShardedGPTJAttention(SubstitutedAttention):
    """Interleaved rotary embedding of a part of each head, read from a table of positions."""

    family = GPTJAttention
    output = "out_proj"
    embed_positions: Tensor

    def __init__(self, original: nn.Module, config: Any):
        super().__init__(original, config)
        module: Any = original
        self.register_buffer("embed_positions", module.embed_positions, persistent=False)
        self._rotary_dim: int = module.rotary_dim or self.head_dim
        self._scale: float = 1.0 / module.scale_attn

    def project(self, hidden_states: Tensor, inputs: dict[str, Any]) -> Projected:
        sin, cos = self.embed_positions[inputs["position_ids"]].to(hidden_states.dtype).chunk(2, dim=-1)
        query, key, value = (
            self.child(name)(hidden_states).unflatten(-1, (-1, self.head_dim))
            for name in ("q_proj", "k_proj", "v_proj")
        )
        query, key = (
            torch.cat((rotate_gptj(x[..., : self._rotary_dim], sin, cos), x[..., self._rotary_dim :]), dim=-1)
            for x in (query, key)
        )
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), Scoring(self._scale)


class ShardedMptAttention(SubstitutedAttention):
    """ALiBi with slopes of its own; queries, keys and values concatenated, and clipped where the config says so."""

    family = MptAttention
    output = "out_proj"

    def __init__(self, original: nn.Module, config: Any):
        super().__init__(original, config)
        module: Any = original
        self._scale: float = module.softmax_scale
        self._clip: float | None = module.clip_qkv
        # Like transformers, it takes a maximal bias of 8 whatever `alibi_bias_max` says.
        self._slopes = self.local(-build_mpt_alibi_tensor(config.num_attention_heads, 2)[:, 0, 0])

    def project(self, hidden_states: Tensor, inputs: dict[str, Any]) -> Projected:
        fused = self.child("Wqkv")(hidden_states)
        if self._clip:
            fused = fused.clamp(-self._clip, self._clip)
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in fused.chunk(3, dim=-1))
        return query, key, value, Scoring(self._scale, alibi_slopes=self._slopes)


def _slopes(build: Callable[..., Tensor], heads: int, dtype: torch.dtype) -> Tensor:
    """``[H]`` from transformers' own function, so that no slope differs."""
    return build(torch.ones(1, 2, dtype=torch.long), heads, dtype)[:, 0, 1]


def split_groups(fused_BSW: Tensor, *, heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Take apart a projection laid out as ``[K, H / K + 2, D]``: a KV head's queries, then its key and its value.

    BLOOM's ``[H, 3, D]`` and multi-query Falcon's ``[H + 2, D]`` are special cases. K follows from the width.
    """
    batch, length, width = fused_BSW.shape
    kv_heads = (width // head_dim - heads) // 2
    assert kv_heads > 0 and heads % kv_heads == 0 and (heads + 2 * kv_heads) * head_dim == width
    grouped = fused_BSW.view(batch, length, kv_heads, heads // kv_heads + 2, head_dim)
    query = grouped[..., :-2, :].flatten(2, 3)
    return query.transpose(1, 2), grouped[..., -2, :].transpose(1, 2), grouped[..., -1, :].transpose(1, 2)
