"""GPT-J: interleaved rotary embedding of a part of each head, read from a table of positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.gptj.modeling_gptj import GPTJAttention, apply_rotary_pos_emb

from megakv.attention.partial import Scoring
from megakv.injection.substitution import SubstitutedAttention, substitute_attention


class ShardedGPTJAttention(SubstitutedAttention):
    """GPT-J's attention over packed, sharded tokens.

    Parameters
    ----------
    original : GPTJAttention
    """

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    out_proj: nn.Module
    embed_positions: Tensor

    def __init__(self, original: nn.Module):
        super().__init__(original)
        module: Any = original
        self.register_buffer("embed_positions", module.embed_positions, persistent=False)
        self._rotary_dim: int = module.rotary_dim or self.head_dim
        self._scale: float = 1.0 / module.scale_attn

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None, position_ids: Tensor, **kwargs: Any
    ) -> tuple[Tensor, None]:
        """``[1, L, hidden]`` to the same, with the rotary angles of `position_ids` ``[1, L]``."""
        sin, cos = self.embed_positions[position_ids].to(hidden_states.dtype).chunk(2, dim=-1)
        query = self._rotated(self._heads(self.q_proj, hidden_states), sin, cos).transpose(1, 2)
        key = self._rotated(self._heads(self.k_proj, hidden_states), sin, cos).transpose(1, 2)
        value = self._heads(self.v_proj, hidden_states).transpose(1, 2)
        return self.out_proj(self.attend(query, key, value, Scoring(self._scale), attention_mask)), None

    def _heads(self, projection: nn.Module, hidden_BSE: Tensor) -> Tensor:
        return projection(hidden_BSE).unflatten(-1, (-1, self.head_dim))

    def _rotated(self, x_BSHD: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
        turned, plain = x_BSHD[..., : self._rotary_dim], x_BSHD[..., self._rotary_dim :]
        return torch.cat((apply_rotary_pos_emb(turned, sin, cos), plain), dim=-1)


def substitute_gptj(model: PreTrainedModel) -> list[nn.Module]:
    """Put MegaKV's attention into a GPT-J model; returns its modules."""
    return substitute_attention(model, GPTJAttention, ShardedGPTJAttention)
