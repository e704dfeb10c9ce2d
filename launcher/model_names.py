"""The model that a command names: a folder, a config.json, a recipe or a hub id."""

from __future__ import annotations

import difflib
from pathlib import Path

import torch

from megakv.costmodel.shape import ModelShape


def model_shape(name: str, *, dtype: torch.dtype | None = None) -> ModelShape:
    """Sizes of a model: a folder with a config.json, such a file, a folder's name in ``recipes``, or a hub id."""
    recipe = _recipes() / name
    found = recipe if not Path(name).exists() and (recipe / "config.json").is_file() else Path(name)
    try:
        if not found.exists() and found.parent != Path() and found.parent.is_dir():
            # A path that was mistyped: no hub has to be asked.
            raise ValueError(f"there is no {name!r}")
        return ModelShape.from_path(found if found.exists() else name, dtype=dtype)
    except ValueError as error:
        near = _nearest(name)
        hint = f"; did you mean {' or '.join(near)}?" if near and not found.exists() else ""
        raise ValueError(f"--model: {error}{hint}") from None


def model_name(model: str) -> str:
    """What a profile of it is named by: the folder of a config file."""
    path = Path(model)
    return str(path.parent) if path.is_file() else model


def _nearest(name: str) -> list[str]:
    """Models near a path that does not exist: beside it, and among the recipes."""
    folders = {path.parent for parent in {Path(name).parent, _recipes()} for path in parent.glob("*/config.json")}
    known = {path.name: str(path) for path in sorted(folders)}
    return [known[near] for near in difflib.get_close_matches(Path(name).name, known, n=3, cutoff=0.5)]


def _recipes() -> Path:
    here = Path("recipes")
    return here if here.is_dir() else Path(__file__).resolve().parents[1] / here
