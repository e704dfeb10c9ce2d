"""MPT: ALiBi with slopes of its own; queries, keys and values concatenated, and clipped where the config says so."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.mpt.modeling_mpt import MptAttention

from megakv.attention.partial import Scoring
from megakv.injection.alibi import mpt_slopes
from megakv.injection.substitution import SubstitutedAttention, substitute_attention


class ShardedMptAttention(SubstitutedAttention):
    """MPT's attention over packed, sharded tokens.

    Parameters
    ----------
    original : MptAttention
    heads : int
        Query heads of the whole model.
    """

    Wqkv: nn.Module
    out_proj: nn.Module

    def __init__(self, original: nn.Module, *, heads: int):
        super().__init__(original)
        module: Any = original
        weight: Any = self.Wqkv.weight
        self._scale: float = module.softmax_scale
        self._clip: float | None = module.clip_qkv
        self._slopes = self.local(mpt_slopes(heads, weight.device))

    def forward(
        self, hidden_states: Tensor, position_bias: Tensor, attention_mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """``[1, L, hidden]`` to the same; `position_bias` was built for a whole sequence in order and is not used."""
        fused = self.Wqkv(hidden_states)
        if self._clip:
            fused = fused.clamp(-self._clip, self._clip)
        query, key, value = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in fused.chunk(3, dim=-1))
        scoring = Scoring(self._scale, alibi_slopes=self._slopes)
        return self.out_proj(self.attend(query, key, value, scoring, attention_mask)), None


def substitute_mpt(model: PreTrainedModel) -> list[nn.Module]:
    """Put MegaKV's attention into an MPT model; returns its modules."""
    config: Any = model.config
    return substitute_attention(
        model, MptAttention, lambda original: ShardedMptAttention(original, heads=config.num_attention_heads)
    )
