"""What an architecture needs beyond the attention interface: one registry of small policies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from megakv.injection.bloom import substitute_bloom
from megakv.injection.falcon import substitute_falcon
from megakv.injection.gptj import substitute_gptj
from megakv.injection.mpt import substitute_mpt


@dataclass(frozen=True)
class Policy:
    """What MegaKV must know of a model type.

    Parameters
    ----------
    positions_from_mask : bool
        Whether the model, given no `position_ids`, counts positions along the attention mask. Others number the slots.
    learned_positions : bool
        Whether positions index a table, so that none beyond its end can be computed.
    substitute : callable, optional
        For families that bypass the attention interface: puts MegaKV's attention modules into a model instance and
        returns them.
    """

    positions_from_mask: bool = False
    learned_positions: bool = False
    substitute: Callable[[PreTrainedModel], list[nn.Module]] | None = None


DEFAULT = Policy()
POLICIES: dict[str, Policy] = {
    "opt": Policy(positions_from_mask=True, learned_positions=True),
    "biogpt": Policy(learned_positions=True),
    "gpt2": Policy(learned_positions=True),
    "gpt_bigcode": Policy(learned_positions=True),
    "gptj": Policy(learned_positions=True, substitute=substitute_gptj),
    "falcon": Policy(substitute=substitute_falcon),
    "bloom": Policy(positions_from_mask=True, substitute=substitute_bloom),
    "mpt": Policy(substitute=substitute_mpt),
}


def policy_for(model_type: str) -> Policy:
    """The policy of a model type; most need none."""
    return POLICIES.get(model_type, DEFAULT)
