"""What MegaKV must know of a model beyond the attention interface: a policy per type, and how it numbers its tokens."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from megakv.injection.families import (
    ShardedBloomAttention,
    ShardedFalconAttention,
    ShardedGPTJAttention,
    ShardedMptAttention,
)
from megakv.injection.substitution import SubstitutedAttention


@dataclass(frozen=True)
class Policy:
    """What MegaKV must know of a model type."""

    positions_from_mask: bool = False
    """Whether the model, given no `position_ids`, counts positions along the mask. Others number the slots."""
    learned_positions: bool = False
    """Whether positions index a table, so that none beyond its end can be computed."""
    substitute: type[SubstitutedAttention] | None = None
    """For families that bypass the attention interface: what takes the place of their attention modules."""


DEFAULT = Policy()
POLICIES: dict[str, Policy] = {
    "opt": Policy(positions_from_mask=True, learned_positions=True),
    "biogpt": Policy(learned_positions=True),
    "gpt2": Policy(learned_positions=True),
    "gpt_bigcode": Policy(learned_positions=True),
    "gptj": Policy(learned_positions=True, substitute=ShardedGPTJAttention),
    "falcon": Policy(substitute=ShardedFalconAttention),
    "bloom": Policy(positions_from_mask=True, substitute=ShardedBloomAttention),
    "mpt": Policy(substitute=ShardedMptAttention),
}


def policy_for(model_type: str) -> Policy:
    """The policy of a model type; most need none."""
    return POLICIES.get(model_type, DEFAULT)


def depends_on_length(model: nn.Module) -> bool:
    """Whether rotary frequencies follow the longest position seen (dynamic NTK, longrope)."""
    kinds: list[str] = []
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        kinds += list(kind.values()) if isinstance(kind, dict) else [kind] if isinstance(kind, str) else []
    return any("dynamic" in kind or kind == "longrope" for kind in kinds)


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether `position_ids` reach the decoder: its model's forward names them, or passes them on unnamed."""
    parameters = inspect.signature(type(model).forward).parameters
    if "position_ids" in parameters:
        return True
    passes_on = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return passes_on and "position_ids" in inspect.signature(type(model.get_decoder()).forward).parameters


class PaddedPositions:
    """Positions that count the tokens which are no padding token, from the one behind its own on (RoBERTa, its kin)."""

    def __init__(self, model: nn.Module):
        found = (m for m in model.modules() if hasattr(m, "create_position_ids_from_input_ids"))
        self._embeddings: Any = next(found, None)

    def __call__(self, ids: Tensor | None, embeds: Tensor | None, past: int) -> Tensor | None:
        """``[B, S]`` positions of new tokens behind `past` cached ones, by the model's code; None if it counts all."""
        if self._embeddings is None:
            return None
        count, padding = self._embeddings, self._embeddings.padding_idx
        if ids is None:
            return count.create_position_ids_from_inputs_embeds(embeds, padding)
        return count.create_position_ids_from_input_ids(ids, padding, past)
