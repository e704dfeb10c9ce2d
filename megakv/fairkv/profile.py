"""The budget profile: how many tokens each KV head of each layer keeps of a user's prompts, in one JSON file.

It is made of what a compressed cache kept, with the paper's Tables 1 and 2, or written by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from megakv.base.loads import barrier_utilisation
from megakv.cache.layer import contiguous_layer
from megakv.costmodel.records import Record, load_record
from megakv.distributed.sharding import IntArray
from megakv.fairkv.budgets import divide

if TYPE_CHECKING:
    from megakv.tracking.report import RunReport
    from megakv.weights.placement import HeadMap

Budget = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Budgets = tuple[tuple[Budget, ...], ...]
BudgetArray = npt.NDArray[np.float64]
"""``[layers, K]``"""
Rate = Annotated[float, Field(ge=0, le=1)]
REMEDY = 'measure it anew, or write {"model": NAME, "budgets": [layer][KV head]}'
TP_SIZES = (2, 4, 8)
"""Tensor-parallel degrees of Table 2."""
SIZES = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim",
)  # fmt: skip
SAMPLES = 16
"""Rows, and columns, of the input embeddings that are sampled."""
TOLERANCE = 0.02
"""Weights of one model in other types differ by less, relative to the largest sample; those of other models by more."""


class ModelIdentity(BaseModel):
    """What tells the model that something was measured on from others that have as many layers and KV heads: fields of
    its config, and samples of its input embeddings, which every rank holds whole.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    sizes: dict[str, int | str | None]
    embeddings: tuple[float, ...]

    @classmethod
    def of_model(cls, model: PreTrainedModel) -> Self:
        return cls(sizes=_sizes(model.config), embeddings=tuple(_samples(model).tolist()))

    def other_sizes(self, config: PreTrainedConfig) -> str | None:
        """The first field of its config that differs for another model."""
        here = _sizes(config)
        differ = (name for name, value in self.sizes.items() if here.get(name) != value)
        return next((f"{name} {self.sizes[name]}, but this model has {here.get(name)}" for name in differ), None)

    def other_weights(self, model: PreTrainedModel) -> str | None:
        """What tells a model of the same sizes with other weights apart."""
        own, here = torch.tensor(self.embeddings, dtype=torch.float64), _samples(model)
        other = own.shape != here.shape or (own - here).abs().max() > TOLERANCE * own.abs().max()
        return "the same sizes, but other weights" if other else None


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


class DataSet(BaseModel):
    """So many `prompts` of one kind, after those of the data sets before it.

    `similarity` is the cosine similarity of its mean budgets with the mean of the other data sets' (the paper's Table
    1). `busy_rates` has by tensor-parallel degree the part of the attention time in which a rank with neighbouring
    heads works (Table 2), the mean over its prompts.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1)
    prompts: int = Field(ge=1)
    similarity: Rate | None = None
    busy_rates: dict[int, Rate]


class BudgetProfile(Record):
    """Tokens kept per head, averaged over a user's prompts.

    `model` is the hub id or folder that it was measured on. ``budgets[layer][KV head]`` are the mean over the prompts,
    ``prompts[prompt][layer][KV head]`` those of every prompt, none above its tokens, `lengths`. `busy_rates` are as in
    `DataSet`, over all prompts.
    """

    format: Literal["megakv budget profile"] = "megakv budget profile"
    version: Literal[1] = 1
    model: str = Field(min_length=1)
    budgets: Budgets = Field(min_length=1)
    prompts: tuple[Budgets, ...] | None = Field(default=None, min_length=1)
    lengths: tuple[Annotated[int, Field(ge=1)], ...] | None = Field(default=None, min_length=1)
    method: str | None = None
    data_sets: tuple[DataSet, ...] | None = Field(default=None, min_length=1)
    busy_rates: dict[int, Rate] | None = None
    identity: ModelIdentity | None = None

    @model_validator(mode="after")
    def _sizes(self) -> Self:
        if not self.budgets[0]:
            raise ValueError("budgets, layer 0: no KV head")
        prompts = self.prompts or ()
        named = {"budgets": self.budgets} | {f"prompt {number}": prompt for number, prompt in enumerate(prompts)}
        for name, budgets in named.items():
            if len(budgets) != self.n_layers:
                raise ValueError(f"{name} has {len(budgets)} layers, budgets {self.n_layers}")
            for layer, row in enumerate(budgets):
                if len(row) != self.n_kv_heads:
                    raise ValueError(
                        f"{name}, layer {layer}: {len(row)} KV heads, but layer 0 of budgets has {self.n_kv_heads}"
                    )
        if self.data_sets is not None and (counted := sum(each.prompts for each in self.data_sets)) != len(prompts):
            raise ValueError(f"data_sets have {counted} prompts, prompts {len(prompts)}")
        if self.lengths is not None:
            if self.prompts is not None and len(self.lengths) != len(prompts):
                raise ValueError(f"{len(self.lengths)} lengths of {len(prompts)} prompts")
            for (name, budgets), length in zip(named.items(), (max(self.lengths), *self.lengths), strict=False):
                _check_length(name, budgets, length)
        return self

    @property
    def n_layers(self) -> int:
        return len(self.budgets)

    @property
    def n_kv_heads(self) -> int:
        return len(self.budgets[0])

    def scaled(self, mean: int, most: int) -> BudgetProfile:
        """Of prompts of which heads keep `mean` tokens on average, none above `most`; single prompts are left out."""
        weights = np.array(self.budgets)
        budgets = divide(mean * weights.size, weights.reshape(-1), most).reshape(weights.shape)
        return BudgetProfile(model=self.model, method=self.method, budgets=_nested(budgets), identity=self.identity)

    def check_model(self, name: str, n_layers: int, n_kv_heads: int) -> None:
        """A `ValueError` for another model's profile; of hub ids and folders the last part is compared."""
        if (self.n_layers, self.n_kv_heads) != (n_layers, n_kv_heads):
            raise ValueError(
                f"is the profile of {self.model!r} with {self.n_layers} layers of {self.n_kv_heads} KV heads; "
                f"{name!r} has {n_layers} layers of {n_kv_heads}; measure a profile of this model"
            )
        if last_part(self.model).lower() != last_part(name).lower():
            raise ValueError(f"is the profile of {self.model!r}, not of {name!r}; measure a profile of this model")

    def check_length(self, length: int) -> None:
        """A `ValueError` for budgets that sequences of `length` tokens cannot fill."""
        _check_length("budgets", self.budgets, length)


def last_part(name: str) -> str:
    """Of a hub id or folder."""
    return name.rstrip("/\\").replace("\\", "/").rpartition("/")[2]


def _check_length(name: str, budgets: Budgets, length: int) -> None:
    for layer, row in enumerate(budgets):
        for head, budget in enumerate(row):
            if budget > length:
                raise ValueError(f"{name}, layer {layer}, KV head {head}: {budget:g} is above the length of {length}")


def load_budgets(path: str | Path, *, setting: str = "profile") -> BudgetProfile:
    """Read and check a profile; the field ``format`` may be missing, so that one can be written by hand."""
    return load_record(BudgetProfile, path, setting=setting, remedy=REMEDY, by_hand=True)


@dataclass(frozen=True)
class MeasuredPrompt:
    """What compression kept of one prompt: its data set, its tokens, and those kept of each KV head."""

    data_set: str
    length: int
    budgets: BudgetArray


def kept_tokens(report: RunReport, heads: HeadMap) -> BudgetArray:
    """Tokens that each KV head of the whole model holds, by a report of all ranks."""
    # Context-parallel ranks hold different tokens of a head; tensor-parallel ones that copy a head hold the same.
    found = np.zeros((report.mesh["cp"], len(heads.layers), heads.n_kv_heads))
    for rank in report.ranks:
        for layer, counts in enumerate(rank.head_tokens):
            # A rank that holds nothing of a layer lists no head.
            if counts:
                found[rank.cp_rank, layer, list(heads.shard(layer, rank.tp_rank).kv_heads)] = counts
    total: BudgetArray = found.sum(axis=0)
    return total


def cosine_similarity(a: BudgetArray, b: BudgetArray) -> float:
    """Of two models' budgets, all heads of all layers as one vector (the paper's Table 1)."""
    norms = float(np.linalg.norm(a) * np.linalg.norm(b))
    return min(1.0, float(np.vdot(a, b)) / norms) if norms > 0 else 1.0


def busy_rate(prompts: Sequence[BudgetArray], tp_size: int) -> float:
    """Part of the attention time in which a rank with neighbouring heads works, mean over prompts (Table 2)."""
    layer = contiguous_layer(prompts[0].shape[1], tp_size)
    loads = ([layer.loads(row, tp_size) for row in rows.tolist()] for rows in prompts)
    return float(np.mean([min(1.0, barrier_utilisation(each)) for each in loads]))


def _busy_rates(prompts: Sequence[BudgetArray]) -> dict[int, float]:
    return {size: busy_rate(prompts, size) for size in TP_SIZES if size <= prompts[0].shape[1]}


def make_profile(
    model: str, method: str, prompts: Sequence[MeasuredPrompt], identity: ModelIdentity | None = None
) -> BudgetProfile:
    """The profile of one measured prompt or more, of a model (hub id or folder) under a compression method."""
    sets: dict[str, list[MeasuredPrompt]] = {}
    for prompt in prompts:
        sets.setdefault(prompt.data_set, []).append(prompt)
    rows = {name: [prompt.budgets for prompt in own] for name, own in sets.items()}
    means = {name: np.mean(own, axis=0) for name, own in rows.items()}
    data_sets = []
    for name, own in rows.items():
        others = [mean for other, mean in means.items() if other != name]
        similarity = cosine_similarity(means[name], np.mean(others, axis=0)) if others else None
        data_sets.append(DataSet(name=name, prompts=len(own), similarity=similarity, busy_rates=_busy_rates(own)))
    # In the order of the data sets, so that each one's prompts follow each other.
    every = [row for own in rows.values() for row in own]
    return BudgetProfile(
        model=model,
        method=method,
        budgets=_nested(np.mean(every, axis=0)),
        prompts=tuple(map(_nested, every)),
        lengths=tuple(prompt.length for own in sets.values() for prompt in own),
        data_sets=tuple(data_sets),
        busy_rates=_busy_rates(every),
        identity=identity,
    )


def _nested(budgets: BudgetArray | IntArray) -> Budgets:
    return tuple(map(tuple, budgets.astype(np.float64).tolist()))
