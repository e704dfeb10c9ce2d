"""What tells models apart that have as many layers and KV heads: sizes, and samples of the weights."""

from __future__ import annotations

from typing import Self

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

SIZES = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim",
)  # fmt: skip
SAMPLES = 16
"""Rows, and columns, of the input embeddings that are sampled."""
TOLERANCE = 0.02
"""Weights of one model in other types differ by less, relative to the largest sample; those of other models by more."""


class ModelIdentity(BaseModel):
    """Of a model that something was measured on: fields of its config, and samples of its input embeddings, which
    every rank holds whole.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    sizes: dict[str, int | str | None]
    embeddings: tuple[float, ...]

    @classmethod
    def of_model(cls, model: PreTrainedModel) -> Self:
        return cls(sizes=_sizes(model.config), embeddings=tuple(_samples(model).tolist()))

    def check_sizes(self, config: PreTrainedConfig) -> None:
        """A `ValueError` with the first field of its config that differs for another model."""
        here = _sizes(config)
        for name, value in self.sizes.items():
            if here.get(name) != value:
                raise ValueError(f"{name} {value}, but this model has {here.get(name)}")

    def check_weights(self, model: PreTrainedModel) -> None:
        """A `ValueError` for a model of the same sizes with other weights."""
        own, here = torch.tensor(self.embeddings, dtype=torch.float64), _samples(model)
        if own.shape != here.shape or (own - here).abs().max() > TOLERANCE * own.abs().max():
            raise ValueError("the same sizes, but other weights")


def _sizes(config: PreTrainedConfig) -> dict[str, int | str | None]:
    text = config.get_text_config()
    found = {name: getattr(text, name, None) for name in SIZES}
    # Some families have a size for each layer.
    return {name: value if isinstance(value, int | str | None) else str(value) for name, value in found.items()}


def _samples(model: PreTrainedModel) -> Tensor:
    """Some input embeddings, float64: rows and columns all over the table."""
    weight = model.get_input_embeddings().weight.detach()
    rows, columns = (torch.linspace(0, count - 1, min(count, SAMPLES)).long() for count in weight.shape)
    return weight[rows.to(weight.device)][:, columns.to(weight.device)].double().cpu().reshape(-1)
