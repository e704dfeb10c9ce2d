"""What MegaKV must know of a model beyond the attention interface: a policy per type, and how it numbers its tokens."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from megakv.base.device import upload
from megakv.base.registry import Registry

if TYPE_CHECKING:
    from megakv.injection.families import SubstitutedForward


@dataclass(frozen=True)
class Policy:
    """What MegaKV must know of a model type."""

    positions_from_mask: bool = False
    """Whether the model, given no `position_ids`, counts positions along the mask. Others number the slots."""
    learned_positions: bool = False
    """Whether positions index a table, so that none beyond its end can be computed."""
    substitute: str | type[SubstitutedForward] | None = None
    """For families that bypass the attention interface: what takes the place of their attention modules, a class or its
    name in `megakv.injection.families`."""

    def substitution(self) -> type[SubstitutedForward] | None:
        """The class that `substitute` means. The families' file imports their own, which others need not wait for."""
        return SUBSTITUTES[self.substitute] if isinstance(self.substitute, str) else self.substitute


DEFAULT = Policy()
POLICIES: Registry[Policy] = Registry(
    "policy of the model type",
    {
        "opt": Policy(positions_from_mask=True, learned_positions=True),
        "biogpt": Policy(learned_positions=True),
        "gpt2": Policy(learned_positions=True),
        "gpt_bigcode": Policy(learned_positions=True),
        "gptj": Policy(learned_positions=True, substitute="GPTJForward"),
        "falcon": Policy(substitute="FalconForward"),
        "bloom": Policy(positions_from_mask=True, substitute="BloomForward"),
        "mpt": Policy(substitute="MptForward"),
    },
)
SUBSTITUTES: Registry[type[SubstitutedForward]] = Registry(
    "substitute",
    {
        name: f"megakv.injection.families:{name}"
        for name in ("GPTJForward", "FalconForward", "BloomForward", "MptForward")
    },
)


def policy_for(model_type: str) -> Policy:
    """The policy of a model type; most need none."""
    return POLICIES.get(model_type, DEFAULT)


RESTARTING = ("phi3", "phimoe", "phi4_multimodal")
"""Types whose `generate` drops its cache, and reads all again, where a sequence passes the original length."""


def depends_on_length(model: nn.Module) -> bool:
    """Whether rotary frequencies follow the longest position seen (dynamic NTK, longrope)."""
    return next(_by_length(model), None) is not None


def _by_length(model: nn.Module) -> Iterator[tuple[Any, str]]:
    """Rotary embeddings whose frequencies follow the length, and their kinds."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        for each in kind.values() if isinstance(kind, dict) else [kind] if isinstance(kind, str) else []:
            if "dynamic" in each or each == "longrope":
                yield module, each


@dataclass(frozen=True)
class RopeSides:
    """Sides of the original length, beyond which a model's rotary frequencies are others."""

    original: int
    exact: bool = False
    """Whether beyond it every length has frequencies of its own (dynamic NTK)."""
    restarts: bool = False
    """Whether a sequence that passes it is read again from its beginning."""

    def of(self, length: int) -> int:
        """The side of a sequence: 0, or the length that its rotary embeddings are to go by."""
        if length <= self.original:
            return 0
        return length if self.exact else self.original + 1


def rope_sides(model: PreTrainedModel) -> RopeSides | None:
    """Sides of a model whose rotary frequencies follow the length; a ValueError where they differ between layers."""
    found: set[tuple[int, bool]] = set()
    for module, kind in _by_length(model):
        if isinstance(module.rope_type, dict):
            raise ValueError(
                f"{type(module).__name__} has rope_type {kind!r} for some layers alone, whose frequencies follow the "
                "longest sequence of a pass: sequences would change one another; serve another model"
            )
        exact = kind != "longrope"
        longrope = module.config.rope_parameters.get("original_max_position_embeddings")
        found.add((int(module.original_max_seq_len if exact else longrope), exact))
    if len(found) > 1:
        raise ValueError("rotary frequencies follow the length in several ways, which is not served")
    return next((RopeSides(*each, model.config.model_type in RESTARTING) for each in found), None)


def forget_lengths(model: nn.Module) -> None:
    """Let dynamic rotary embeddings, which remember the longest sequence, begin anew: a short one makes them forget."""
    for module, kind in _by_length(model):
        if kind != "longrope":
            buffer = module.inv_freq
            module(buffer, buffer.new_zeros((1, 1), dtype=torch.int64))


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether `position_ids` reach the decoder: its model's forward names them, or passes them on unnamed."""
    parameters = inspect.signature(type(model).forward).parameters
    if "position_ids" in parameters:
        return True
    passes_on = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return passes_on and "position_ids" in inspect.signature(type(model.get_decoder()).forward).parameters


def _of_text(given: Tensor, mask: NDArray[np.bool_]) -> Tensor:
    """``[B, T]`` of positions that are counted along the axes of images, too, ``[A, B, T]``: of text all are equal."""
    if given.dim() < 3:
        return given
    if not bool((given == given[:1])[:, upload(mask, given.device).expand(given.shape[1:])].all()):
        raise ValueError(f"position_ids {list(given.shape)} are those of images or videos: MegaKV reads text alone")
    return given[0]


class Positions:
    """How a model numbers tokens: by what it is given, along the mask, by slot, or by code of its own."""

    def __init__(self, model: PreTrainedModel):
        alibi = bool(getattr(model.config, "alibi", False))
        self.taken = takes_positions(model)
        self._given = self.taken and not alibi
        # Biases of positions are counted along the mask, whatever position_ids say.
        self._counted = alibi or policy_for(model.config.model_type).positions_from_mask
        # RoBERTa and its kin count tokens that are no padding token, from the one behind its own on.
        found = (m for m in model.modules() if hasattr(m, "create_position_ids_from_input_ids"))
        self._embeddings: Any = next(found, None)

    def of(
        self, inputs: dict[str, Any], mask: NDArray[np.bool_], length: int, pasts: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        """``[B, T]`` of new tokens behind ``[B]`` cached ones, of which `mask` shows which are real."""
        past = pasts[:, None]
        given: Tensor | None = inputs.get("position_ids")
        if given is None and self._embeddings is not None:
            count, padding, ids = self._embeddings, self._embeddings.padding_idx, inputs.get("input_ids")
            if ids is None:
                given = count.create_position_ids_from_inputs_embeds(inputs["inputs_embeds"], padding)
            else:
                given = count.create_position_ids_from_input_ids(ids, padding, upload(past, ids.device))
        if given is not None and self._given:
            given = _of_text(given, mask[:, -length:])
            positions = given.detach().cpu().numpy().astype(np.int64).reshape(-1, length)
        elif self._counted:
            counted = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
            positions = counted[:, -length:] + (past if mask.shape[1] == length else 0)
        else:
            positions = past + np.arange(length)
        return np.broadcast_to(positions, (mask.shape[0], length))
