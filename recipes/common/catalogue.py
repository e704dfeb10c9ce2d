"""What a recipe is: a model's config.json, JSON configs of runs, and in recipe.json what each of them is for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from megakv.costmodel.records import Record, load_record

RECIPES = Path(__file__).resolve().parents[1]
FILE = "recipe.json"

Count = Annotated[int, Field(ge=1)]


class Run(BaseModel):
    """One JSON config of a recipe, and what it was made for.

    Parameters
    ----------
    config : str
        File beside recipe.json.
    hardware : str
        Name of the machine, as ``megakv plan`` and ``megakv dry-run`` take it.
    context, batch, new_tokens : int
        Tokens of each prompt, prompts, and tokens generated for each.
    purpose : str
    source : str, optional
        Where a paper describes this run.
    published_ttft_s : float, optional
        What the paper measured.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: str
    hardware: str
    context: Count
    batch: Count = 1
    new_tokens: Annotated[int, Field(ge=0)] = 0
    purpose: str
    source: str | None = None
    published_ttft_s: Annotated[float, Field(gt=0)] | None = None


class Recipe(Record):
    """The recipe of one model.

    Parameters
    ----------
    title : str
    notes : tuple of str
        What a user must know about config.json or the runs.
    runs : tuple of Run
        The first is the default of run.sh.
    """

    format: Literal["megakv recipe"] = "megakv recipe"
    title: str
    notes: tuple[str, ...] = ()
    runs: tuple[Run, ...] = Field(min_length=1)


def names() -> list[str]:
    """The folders of all recipes."""
    return sorted(path.parent.name for path in RECIPES.glob(f"*/{FILE}"))


def load_recipe(name: str) -> Recipe:
    """Read and check a recipe.

    Raises
    ------
    ValueError
        If there is none of that name, or its file is not right.
    """
    if name not in names():
        raise ValueError(f"recipe {name!r} is not one of {', '.join(names())}")
    return load_record(Recipe, RECIPES / name / FILE, setting="recipe", remedy="see recipes/common/catalogue.py")


def find_run(recipe: Recipe, config: str | None) -> Run:
    """The run of a config file; the first of the recipe if None.

    Raises
    ------
    ValueError
        If the recipe names no such file.
    """
    found = [run for run in recipe.runs if config in (None, run.config)]
    if not found:
        raise ValueError(f"config {config!r} is not one of {', '.join(run.config for run in recipe.runs)}")
    return found[0]
