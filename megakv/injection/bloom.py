"""BLOOM: ALiBi, queries, keys and values fused per head, the residual added inside the attention module."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.bloom.modeling_bloom import BloomAttention

from megakv.attention.partial import Scoring
from megakv.injection.alibi import bloom_slopes
from megakv.injection.substitution import SubstitutedAttention, split_groups, substitute_attention


class ShardedBloomAttention(SubstitutedAttention):
    """BLOOM's attention over packed, sharded tokens.

    Parameters
    ----------
    original : BloomAttention
    heads : int
        Query heads of the whole model.
    """

    query_key_value: nn.Module
    dense: nn.Module

    def __init__(self, original: nn.Module, *, heads: int):
        super().__init__(original)
        weight: Any = self.query_key_value.weight
        self._slopes = self.local(bloom_slopes(heads, weight.device))

    def forward(
        self, hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """``[1, L, hidden]`` to the same; `alibi` was built for a whole sequence in order and is not used."""
        heads = len(self._slopes)
        query, key, value = split_groups(self.query_key_value(hidden_states), heads=heads, head_dim=self.head_dim)
        scoring = Scoring(self.head_dim**-0.5, alibi_slopes=self._slopes)
        return self.dense(self.attend(query, key, value, scoring, attention_mask)) + residual, None


def substitute_bloom(model: PreTrainedModel) -> list[nn.Module]:
    """Put MegaKV's attention into a BLOOM model; returns its modules.

    Raises
    ------
    ValueError
        If the config asks for products in slices, in the order of Megatron's ranks.
    """
    config: Any = model.config
    if config.slow_but_exact and config.pretraining_tp > 1:
        raise ValueError("slow_but_exact = True is not supported with MegaKV; set it to false in the model's config")
    return substitute_attention(
        model, BloomAttention, lambda original: ShardedBloomAttention(original, heads=config.num_attention_heads)
    )
