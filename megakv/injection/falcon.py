"""Falcon: rotary or ALiBi; grouped (40B), single (7B) or separate (RW) KV heads in one fused projection."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.falcon.modeling_falcon import FalconAttention, apply_rotary_pos_emb

from megakv.attention.partial import Scoring
from megakv.injection.alibi import falcon_bias, falcon_slopes, with_key_bias
from megakv.injection.substitution import SubstitutedAttention, split_groups, substitute_attention


class ShardedFalconAttention(SubstitutedAttention):
    """Falcon's attention over packed, sharded tokens.

    Equal to transformers' default (``sdpa``) attention of the family. Its ``eager`` one adds ALiBi twice.

    Parameters
    ----------
    original : FalconAttention
    """

    query_key_value: nn.Module
    dense: nn.Module

    def __init__(self, original: nn.Module):
        super().__init__(original)
        config: Any = original.config
        weight: Any = self.query_key_value.weight
        self._slopes = self.local(falcon_slopes(config.num_attention_heads, weight.device)) if config.alibi else None

    def forward(
        self,
        hidden_states: Tensor,
        alibi: Tensor | None,
        attention_mask: Tensor | None,
        position_ids: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """``[1, L, hidden]`` to the same; `alibi` was built for a whole sequence in order and is not used."""
        weight: Any = self.dense.weight
        heads = weight.shape[1] // self.head_dim
        query, key, value = split_groups(self.query_key_value(hidden_states), heads=heads, head_dim=self.head_dim)
        if self._slopes is None:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        else:
            group = heads // key.shape[1]
            if group > 1:
                key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
            query, key = with_key_bias(query, key, falcon_bias(self._slopes, position_ids[0], key.dtype))
        return self.dense(self.attend(query, key, value, Scoring(self.head_dim**-0.5), attention_mask)), None


def substitute_falcon(model: PreTrainedModel) -> list[nn.Module]:
    """Put MegaKV's attention into a Falcon model; returns its modules."""
    return substitute_attention(model, FalconAttention, ShardedFalconAttention)
