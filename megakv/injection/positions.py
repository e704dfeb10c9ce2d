"""Which positions a model gives to tokens when it is given none, and whether it can be given any."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether `position_ids` reach the decoder: its model's forward names them, or passes them on unnamed."""
    parameters = inspect.signature(type(model).forward).parameters
    if "position_ids" in parameters:
        return True
    passes_on = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return passes_on and "position_ids" in inspect.signature(type(model.get_decoder()).forward).parameters


class PaddedPositions:
    """Positions counted over the tokens that are no padding token, from the one behind its own (RoBERTa and its kin).

    Parameters
    ----------
    embeddings : nn.Module
        The model's embeddings, which have functions for it.
    """

    def __init__(self, embeddings: nn.Module):
        self._embeddings: Any = embeddings

    @classmethod
    def of(cls, model: nn.Module) -> PaddedPositions | None:
        """Those of a model; None where it numbers its tokens otherwise."""
        return next((cls(m) for m in model.modules() if hasattr(m, "create_position_ids_from_input_ids")), None)

    def __call__(self, ids: Tensor | None, embeds: Tensor | None, past: int) -> Tensor:
        """``[B, S]`` positions of new tokens behind `past` cached ones, as the model's own forward counts them."""
        padding = self._embeddings.padding_idx
        if ids is not None:
            positions: Tensor = self._embeddings.create_position_ids_from_input_ids(ids, padding, past)
            return positions
        positions = self._embeddings.create_position_ids_from_inputs_embeds(embeds, padding)
        return positions
