"""The budget profile: how many tokens each KV head of each layer keeps, in one JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from megakv.costmodel.records import Record, load_record
from megakv.fairkv.identity import ModelIdentity

Budget = Annotated[float, Field(ge=0, allow_inf_nan=False, strict=True)]
Budgets = tuple[tuple[Budget, ...], ...]
Rate = Annotated[float, Field(ge=0, le=1)]
REMEDY = 'measure it anew, or write {"model": NAME, "budgets": [layer][KV head]}'


def _check_shape(name: str, budgets: Budgets, layers: int, heads: int) -> None:
    if len(budgets) != layers:
        raise ValueError(f"{name} has {len(budgets)} layers, budgets {layers}")
    for layer, row in enumerate(budgets):
        if len(row) != heads:
            raise ValueError(f"{name}, layer {layer}: {len(row)} KV heads, but layer 0 of budgets has {heads}")


class DataSet(BaseModel):
    """Prompts of one kind, and how their budgets compare with the others'.

    Parameters
    ----------
    name : str
    prompts : int
        So many of the profile's prompts, after those of the data sets before it.
    similarity : float, optional
        Cosine similarity of its mean budgets with the mean of the other data sets' (the paper's Table 1); None where
        there is no other.
    busy_rates : dict
        Tensor-parallel degree to the part of the attention time in which a rank with neighbouring heads works (Table
        2), the mean over its prompts.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1)
    prompts: int = Field(ge=1)
    similarity: Rate | None = None
    busy_rates: dict[int, Rate]


class BudgetProfile(Record):
    """Tokens kept per head, averaged over a user's prompts.

    Parameters
    ----------
    model : str
        Hub id or folder of the model that it was measured on.
    budgets : tuple
        ``[layer][KV head]``: tokens kept of each head, not negative; the mean over the prompts.
    prompts : tuple, optional
        ``[prompt][layer][KV head]``: the same of every prompt.
    lengths : tuple of int, optional
        Tokens of every prompt; no budget may be above its prompt's length, nor the mean above the longest.
    method : str, optional
        The compression that chose the tokens.
    data_sets : tuple of DataSet, optional
        Where the prompts are from, in their order.
    busy_rates : dict, optional
        As in `DataSet`, the mean over all prompts.
    identity : ModelIdentity, optional
        What tells the model from others, however it is called.
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
        _check_shape("budgets", self.budgets, self.n_layers, self.n_kv_heads)
        for number, prompt in enumerate(self.prompts or ()):
            _check_shape(f"prompt {number}", prompt, self.n_layers, self.n_kv_heads)
        if self.data_sets is not None:
            counted = sum(each.prompts for each in self.data_sets)
            if counted != len(self.prompts or ()):
                raise ValueError(f"data_sets have {counted} prompts, prompts {len(self.prompts or ())}")
        if self.lengths is not None:
            if self.prompts is not None and len(self.lengths) != len(self.prompts):
                raise ValueError(f"{len(self.lengths)} lengths of {len(self.prompts)} prompts")
            _check_length("budgets", self.budgets, max(self.lengths))
            for number, (prompt, length) in enumerate(zip(self.prompts or (), self.lengths, strict=False)):
                _check_length(f"prompt {number}", prompt, length)
        return self

    @property
    def n_layers(self) -> int:
        """Layers of the model."""
        return len(self.budgets)

    @property
    def n_kv_heads(self) -> int:
        """KV heads of a layer."""
        return len(self.budgets[0])

    def check_model(self, name: str, n_layers: int, n_kv_heads: int) -> None:
        """Refuse the profile of another model.

        Folders are compared by their last part, so that a model may lie anywhere.

        Parameters
        ----------
        name : str
            Hub id or folder of the model in use.
        n_layers, n_kv_heads : int

        Raises
        ------
        ValueError
            Naming what differs.
        """
        if (self.n_layers, self.n_kv_heads) != (n_layers, n_kv_heads):
            raise ValueError(
                f"is the profile of {self.model!r} with {self.n_layers} layers of {self.n_kv_heads} KV heads; "
                f"{name!r} has {n_layers} layers of {n_kv_heads}; measure a profile of this model"
            )
        if _last_part(self.model) != _last_part(name):
            raise ValueError(f"is the profile of {self.model!r}, not of {name!r}; measure a profile of this model")

    def check_length(self, length: int) -> None:
        """Refuse budgets that sequences of `length` tokens cannot fill.

        Raises
        ------
        ValueError
            Naming the layer, the head and the budget.
        """
        _check_length("budgets", self.budgets, length)


def _last_part(name: str) -> str:
    return name.rstrip("/\\").replace("\\", "/").rpartition("/")[2].lower()


def _check_length(name: str, budgets: Budgets, length: int) -> None:
    for layer, row in enumerate(budgets):
        for head, budget in enumerate(row):
            if budget > length:
                raise ValueError(f"{name}, layer {layer}, KV head {head}: {budget:g} is above the length of {length}")


def load_budgets(path: str | Path, *, setting: str = "profile") -> BudgetProfile:
    """Read and check a profile; the field ``format`` may be missing, so that one can be written by hand.

    Raises
    ------
    ValueError
        If it cannot be read, is something else or holds an impossible value: names the setting, the file and the field.
    """
    return load_record(BudgetProfile, path, setting=setting, remedy=REMEDY, by_hand=True)
