"""Families whose attention bypasses transformers' interface: how each makes queries, keys, values and biases.

An engine's model of such a family keeps its modules, children and weights; each attention module gets another way from
its children to its output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.bloom.modeling_bloom import BloomAttention
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as build_bloom_alibi
from transformers.models.falcon.modeling_falcon import FalconAttention
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb as rotate_falcon
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as build_falcon_alibi
from transformers.models.gptj.modeling_gptj import GPTJAttention
from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb as rotate_gptj
from transformers.models.mpt.modeling_mpt import MptAttention, build_mpt_alibi_tensor

from megakv.attention.reference import Scoring
from megakv.base.errors import MegaKVError
from megakv.injection.interface import attend_of, described_mask

Projected = tuple[Tensor, Tensor, Tensor, Scoring]
"""``[1, H, L, D]``, ``[1, K, L, D]`` and ``[1, K, L, Dv]`` of this rank's packed tokens, and how they are scored."""


class SubstitutedForward:
    """In the place of the `forward` of one attention module, whose weights must be there.

    Head counts come from the shapes of its weights, which tensor parallelism has cut to this rank's heads, and never
    from the config.
    """

    family: ClassVar[type[nn.Module]]
    output: ClassVar[str]
    """Name of the projection behind attention."""

    def __init__(self, module: nn.Module, config: Any):
        self.module: Any = module
        # Of the module alone, as accelerate's hooks are.
        self.replaced = vars(module).get("forward")
        self.slopes = self.all_slopes(config)
        if self.slopes is not None:
            # Absent where all heads are here.
            shard = getattr(module, "head_shard", None)
            here = slice(None) if shard is None else torch.tensor(shard.query_heads, device=self.slopes.device)
            self.slopes = self.slopes[here].to(next(module.parameters()).device)

    @classmethod
    def check(cls, config: Any) -> None:
        """Refuse what a model's config asks for and is not done here: a ValueError says what."""

    def all_slopes(self, config: Any) -> Tensor | None:
        """``[H]`` slopes of ALiBi of the whole model's query heads, if it has such biases."""
        return None

    def project(self, hidden_states: Tensor, inputs: dict[str, Any]) -> Projected:
        """Queries, keys and values of ``[1, L, hidden]``, from what the model gives to the family's modules.

        Biases that a model built for a whole sequence in order are among the inputs, and no use.
        """
        raise NotImplementedError

    def __call__(
        self, hidden_states: Tensor, residual: Tensor | None = None, *, attention_mask: Tensor | None, **inputs: Any
    ) -> tuple[Tensor, None]:
        """``[1, L, hidden]`` to the same."""
        query, key, value, scoring = self.project(hidden_states, inputs)
        if described_mask(self.module, attention_mask).window is not None:
            raise MegaKVError(
                f"the model asks for a sliding window, which its {self.family.__name__} does not have in MegaKV"
            )
        attended = attend_of(self.module)(self.module.layer_idx, query, key, value, scoring, None)
        out = getattr(self.module, self.output)(attended.flatten(2))
        return out if residual is None else out + residual, None


def substitute_attention(model: PreTrainedModel, kind: type[SubstitutedForward]) -> None:
    """Give a model's attention modules another `forward`, but those that have it; their class stays."""
    kind.check(model.config)
    for module in model.modules():
        if isinstance(module, kind.family) and not isinstance(module.forward, SubstitutedForward):
            module.forward = kind(module, model.config)


def restore_attention(module: nn.Module) -> None:
    """Take back what `substitute_attention` did to a module."""
    if isinstance(substitute := module.forward, SubstitutedForward):
        del module.forward
        if substitute.replaced is not None:
            module.forward = substitute.replaced


class BloomForward(SubstitutedForward):
    """ALiBi, queries, keys and values fused per head; the residual is added inside the module."""

    family = BloomAttention
    output = "dense"

    @classmethod
    def check(cls, config: Any) -> None:
        """Refuse products in slices, in the order of Megatron's ranks."""
        if config.slow_but_exact and config.pretraining_tp > 1:
            raise ValueError(
                "slow_but_exact = True is not supported with MegaKV; set it to false in the model's config"
            )

    def all_slopes(self, config: Any) -> Tensor:
        return _slopes(build_bloom_alibi, config.num_attention_heads, torch.float32)

    def project(self, hidden_states: Tensor, inputs: dict[str, Any]) -> Projected:
        query, key, value = _split_groups(self.module, hidden_states)
        return query, key, value, Scoring(self.module.head_dim**-0.5, alibi_slopes=self.slopes)


class FalconForward(SubstitutedForward):
    """Rotary or ALiBi; grouped (40B), single (7B) or separate (RW) KV heads in one fused projection.

    Equal to transformers' default (``sdpa``) attention of the family. Its ``eager`` one adds ALiBi twice.
    """

    family = FalconAttention
    output = "dense"

    def all_slopes(self, config: Any) -> Tensor | None:
        return _slopes(build_falcon_alibi, config.num_attention_heads, torch.bfloat16) if config.alibi else None

    def project(self, hidden_states: Tensor, inputs: dict[str, Any]) -> Projected:
        query, key, value = _split_groups(self.module, hidden_states)
        if self.slopes is None:
            query, key = rotate_falcon(query, key, *inputs["position_embeddings"])
        else:
            group = query.shape[1] // key.shape[1]
            if group > 1:
                key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
            # Products rounded to bfloat16, also in a float32 model: from position 256 on they grow in steps, so slopes
            # alone cannot give them. They enter through one more column of queries and keys, which every kernel, the
            # cache and the ring carry without knowing.
            bias_HS = (self.slopes[:, None] * inputs["position_ids"][0]).to(key.dtype)
            ones = query.new_ones((*query.shape[:-1], 1))
            query, key = torch.cat((query, ones), dim=-1), torch.cat((key, bias_HS[None, :, :, None]), dim=-1)
        return query, key, value, Scoring(self.module.head_dim**-0.5)


class GPTJForward(SubstitutedForward):
    """Interleaved rotary embedding of a part of each head, read from a table of positions."""

    family = GPTJAttention
    output = "out_proj"

    def project(self, hidden_states: Tensor, inputs: dict[str, Any]) -> Projected:
        module = self.module
        turned = module.rotary_dim or module.head_dim
        sin, cos = module.embed_positions[inputs["position_ids"]].to(hidden_states.dtype).chunk(2, dim=-1)
        query, key, value = (
            projection(hidden_states).unflatten(-1, (-1, module.head_dim))
            for projection in (module.q_proj, module.k_proj, module.v_proj)
        )
        query, key = (
            torch.cat((rotate_gptj(x[..., :turned], sin, cos), x[..., turned:]), dim=-1) for x in (query, key)
        )
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), Scoring(1.0 / module.scale_attn)


class MptForward(SubstitutedForward):
    """ALiBi with slopes of its own; queries, keys and values concatenated, and clipped where the config says so."""

    family = MptAttention
    output = "out_proj"

    def all_slopes(self, config: Any) -> Tensor:
        # Like transformers, it takes a maximal bias of 8 whatever `alibi_bias_max` says.
        return -build_mpt_alibi_tensor(config.num_attention_heads, 2)[:, 0, 0]

    def project(self, hidden_states: Tensor, inputs: dict[str, Any]) -> Projected:
        module = self.module
        fused = module.Wqkv(hidden_states)
        if module.clip_qkv:
            fused = fused.clamp(-module.clip_qkv, module.clip_qkv)
        query, key, value = (
            part.unflatten(-1, (-1, module.head_dim)).transpose(1, 2) for part in fused.chunk(3, dim=-1)
        )
        return query, key, value, Scoring(module.softmax_scale, alibi_slopes=self.slopes)


def _slopes(build: Callable[..., Tensor], heads: int, dtype: torch.dtype) -> Tensor:
    """``[H]`` from transformers' own function, so that no slope differs."""
    return build(torch.ones(1, 2, dtype=torch.long), heads, dtype)[:, 0, 1]


def _split_groups(module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Take apart a projection laid out as ``[K, H / K + 2, D]``: a KV head's queries, then its key and its value.

    BLOOM's ``[H, 3, D]`` and multi-query Falcon's ``[H + 2, D]`` are special cases. K follows from the width.
    """
    fused_BSW, head_dim = module.query_key_value(hidden_states), module.head_dim
    heads, width = module.dense.in_features // head_dim, fused_BSW.shape[-1]
    kv_heads = (width // head_dim - heads) // 2
    assert kv_heads > 0 and heads % kv_heads == 0 and (heads + 2 * kv_heads) * head_dim == width
    grouped = fused_BSW.unflatten(-1, (kv_heads, heads // kv_heads + 2, head_dim))
    query = grouped[..., :-2, :].flatten(2, 3)
    return query.transpose(1, 2), grouped[..., -2, :].transpose(1, 2), grouped[..., -1, :].transpose(1, 2)
