"""Writes the README of every recipe, and the table of all recipes: ``python -m recipes.common.readme``."""

from __future__ import annotations

from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from megakv.base.errors import MegaKVError
from megakv.costmodel.shape import ModelShape
from megakv.engine.config import MegaKVConfig
from megakv.planner.dry_run import DryRun
from megakv.tracking.files import write_whole
from recipes.common.catalogue import RECIPES, Recipe, Run, load_recipe, names
from recipes.common.forecast import Forecast, dry_run_of, forecast, load_run

GB = 10**9
HEAD = """# {title}

{parameters:.1f} billion parameters, {layers} layers, {heads} query heads, {kv_heads} KV heads of dimension {dim}.
`config.json` is the architecture alone; there are no weights here. Give the directory or hub id of a checkpoint to run:

```
bash recipes/{name}/run.sh --dry-run    # every rank without weights, in seconds
bash recipes/{name}/run.sh --model DIR --prompt-file book.txt --question "Who did it?"
bash recipes/{name}/run.sh --model DIR --hostfile hosts --config {last} --prompt-file book.txt
```

A hostfile has a line `NAME slots=RANKS` for each host; [several hosts](../../docs/hosts.md) says what they need.

"""
FOOT = """
Times are the cost model's, for the machine named; memory is counted by the dry run on the fullest rank, tensors of a
layer as the cost model estimates them. Heads of a compressed cache are taken to keep equally many tokens. This file is
written by `python -m recipes.common.readme`, the planned configs by `python -m recipes.common.plans`.
"""


def document(name: str) -> str:
    """The README of a recipe.

    Raises
    ------
    MegaKVError
        If a run does not fit its machine.
    """
    recipe = load_recipe(name)
    shape = ModelShape.from_path(RECIPES / name)
    text = HEAD.format(
        title=recipe.title,
        name=name,
        parameters=shape.parameters / 1e9,
        layers=len(shape.layers),
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        dim=shape.key_dim,
        last=recipe.runs[-1].config,
    )
    text += "".join(f"- {note}\n" for note in recipe.notes) + "\n" * bool(recipe.notes)
    return text + _runs(name, recipe) + _predictions(name, recipe) + FOOT


def _runs(name: str, recipe: Recipe) -> str:
    lines = ["| config | mesh | machine | for | source |", "|---|---|---|---|---|"]
    for run in recipe.runs:
        mesh = _mesh(load_run(name, run))
        cells = [f"[{run.config}]({run.config})", mesh, f"`{run.hardware}`", run.purpose, run.source or ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n\n"


def _predictions(name: str, recipe: Recipe) -> str:
    lines = [
        "| config | tokens | method | TTFT | published | TTIT | weights GB | KV GB | sum GB | of |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    made: dict[tuple[torch.dtype, str], PreTrainedModel] = {}
    lines += [_prediction(run, forecast(name, run), dry_run_of(name, run, made)) for run in recipe.runs]
    return "\n".join(lines) + "\n"


def _prediction(run: Run, times: Forecast, found: DryRun) -> str:
    if found.problem is not None:
        raise MegaKVError(f"{run.config}: {found.problem}")
    fullest = max(found.ranks, key=lambda rank: rank.total_bytes)
    memory = [fullest.weight_bytes, fullest.kv_bytes, fullest.total_bytes, found.memory_bytes or 0]
    cells = [
        f"`{run.config}`",
        f"{f'{run.batch} x ' if run.batch > 1 else ''}{run.context:,}",
        times.prefill,
        seconds(times.ttft_s),
        "" if run.published_ttft_s is None else f"{run.published_ttft_s:g} s",
        seconds(times.ttit_s),
        *(f"{size / GB:.1f}" for size in memory),
    ]
    return f"| {' | '.join(cells)} |"


def _mesh(config: MegaKVConfig) -> str:
    return f"CP {config.cp_size} x TP {config.tp_size}"


def seconds(value: float) -> str:
    """Two figures of a time: no prediction deserves more."""
    if value >= 10:
        return f"{value:.0f} s"
    return f"{value:.1f} s" if value >= 1 else f"{float(f'{value * 1e3:.2g}'):.0f} ms"


def main() -> None:
    """Write every README anew."""
    for name in tqdm(names(), unit="recipe"):
        write_whole(Path(RECIPES, name, "README.md"), document(name).encode())


if __name__ == "__main__":
    main()
