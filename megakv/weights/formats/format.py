"""The protocol of weight formats, with what plain weights need of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from megakv.weights.checkpoint import CheckpointWeights
from megakv.weights.gguf import gguf_of
from megakv.weights.placement.slices import SliceSpec
from megakv.weights.sources import WeightSource

Owner = tuple[nn.Module, str]
"""A module and the name of one of its parameters."""


@dataclass(frozen=True)
class LoadRequest:
    """Settings that a format may have to refuse, before anything is read."""

    device: torch.device
    dtype: torch.dtype | None
    """The type asked for; None for the weights' own."""
    tp_size: int = 1
    offloaded: bool = False
    """Whether weights of decoder layers lie off the accelerator."""


def quantization_of(config: PreTrainedConfig) -> dict[str, Any]:
    """What a config says of how weights are quantised; empty for plain ones."""
    for each in (config, config.get_text_config()):
        found = getattr(each, "quantization_config", None)
        if found is not None:
            values = found if isinstance(found, dict) else found.to_dict()
            return {**values, "quant_method": str(getattr(method := values.get("quant_method"), "value", method))}
    return {}


class WeightFormat:
    """One load of a model's weights, in the order in which the methods are called. This class loads them as they are.

    `directory` is the model's folder; None for a module that is given, and for random weights.
    """

    name: ClassVar[str]
    """The word in the report, and the value of ``megakv.weights.format`` where weights are made at load."""
    at_load: ClassVar[bool] = False
    """Whether plain weights are brought into this format as they are read; else it is one that checkpoints have."""
    loses: ClassVar[str] = ""
    """What of a plain checkpoint's weights is lost at load; empty for exact formats."""
    multiples: tuple[int, ...] = ()
    """Columns that a row-parallel weight is cut at multiples of, as far as its width has them; the widest first."""

    def __init__(self, directory: Path | None = None):
        self.directory = directory
        self.made: dict[str, tuple[str, ...]] = {}
        """By the name of each weight that `make` fills: names of the parameters that come of it, itself the first."""
        self.notes: list[str] = []
        """What a user should know of how weights are held."""

    @classmethod
    def recognises(cls, directory: Path, config: PreTrainedConfig) -> bool:
        """Whether a folder's weights are stored in this format."""
        return not cls.at_load

    @property
    def origin(self) -> Path | None:
        """The folder or file that a user knows the weights by."""
        return self.directory

    @property
    def quantised(self) -> str | None:
        """The types that stored weights are quantised in, as a user knows them; None for plain ones."""
        return None

    def check(self, request: LoadRequest, config: PreTrainedConfig) -> None:
        """Refuse what cannot be, by the name of the setting."""

    def replace(self, model: PreTrainedModel) -> None:
        """See the whole model before it is cut, and put other modules, without memory, in the places of its own."""

    def source(self, directory: Path, model: PreTrainedModel) -> WeightSource:
        """The stored weights of the whole model."""
        return CheckpointWeights(directory, model)

    def check_cut(self, placement: Mapping[str, SliceSpec], tp_size: int) -> None:
        """Refuse parts of weights that begin or end where this format cannot be cut, with what would work."""

    def prepare(self, model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Replace modules of this rank's share, without memory still, by those that multiply with this format.

        They compute in `dtype`.

        Returns the types of parameters that are kept in another one than the model's, by name.
        """
        return {}

    def make(self, owners: Sequence[Owner], part: Tensor, homes: Sequence[Tensor | None]) -> None:
        """Fill a weight of `made`, for all tied owners, from this rank's plain part of it, of which nothing is kept.

        `homes` is memory for it and for what comes with it, where that is given.
        """
        raise NotImplementedError

    def finish(self, model: PreTrainedModel) -> None:
        """Complete a model whose parameters are all filled."""

    def contents(self, tp_size: int) -> dict[str, str]:
        """What else decides the values of weights, for digests."""
        return {}


class PlainFormat(WeightFormat):
    """Weights of a floating-point type, multiplied as they are: what most folders of safetensors hold."""

    name = "plain"

    @classmethod
    def recognises(cls, directory: Path, config: PreTrainedConfig) -> bool:
        return gguf_of(directory) is None
