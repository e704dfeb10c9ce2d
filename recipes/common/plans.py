"""What the planner recommends for a recipe's model: writes every planned_N.json, ``python -m recipes.common.plans``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from megakv.costmodel.presets import hardware
from megakv.costmodel.shape import ModelShape
from megakv.planner.choices import Demand, choice_config
from megakv.planner.cluster import ClusterPlanner
from megakv.tracking.files import write_whole
from recipes.common.catalogue import RECIPES, Run, load_recipe, names


def accelerators(run: Run) -> int | None:
    """How many the planner was asked for; None for a run that people wrote."""
    found = re.fullmatch(r"planned_(\d+)\.json", run.config)
    return None if found is None else int(found[1])


def planned(name: str, run: Run) -> dict[str, Any]:
    """The JSON of the planner's best choice for a run's machine, prompts and number of accelerators.

    Raises
    ------
    ValueError
        If the run is not a planned one.
    MegaKVError
        If nothing fits.
    """
    gpus = accelerators(run)
    if gpus is None:
        raise ValueError(f"{run.config}: allowed: planned_N.json, N accelerators")
    folder, machine = RECIPES / name, hardware(run.hardware)
    model = ModelShape.from_path(folder, dtype=getattr(torch, machine.spec.dtype))
    demand = Demand(context=run.context, gpus=gpus, batch=run.batch, new_tokens=run.new_tokens)
    return choice_config(ClusterPlanner(machine, model).plan(demand).choices[0], machine, model)


def main() -> None:
    """Write every planned configuration anew."""
    for name in tqdm(names(), unit="recipe"):
        for run in load_recipe(name).runs:
            if accelerators(run) is not None:
                text = json.dumps(planned(name, run), indent=2) + "\n"
                write_whole(Path(RECIPES, name, run.config), text.encode())


if __name__ == "__main__":
    main()
