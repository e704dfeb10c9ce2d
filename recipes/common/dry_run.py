"""Dry runs of recipes: ``python -m recipes.common.dry_run [RECIPE...] [--config FILE]``; all of them by default."""

from __future__ import annotations

import argparse
import sys

import torch
from transformers import PreTrainedModel

from megakv.base.errors import MegaKVError
from megakv.costmodel.presets import hardware
from megakv.launcher.commands.dry_run import describe
from recipes.common.catalogue import find_run, load_recipe, names
from recipes.common.forecast import dry_run_of


def main(argv: list[str] | None = None) -> int:
    """Entry of the script."""
    parser = argparse.ArgumentParser(description="Build every rank of recipes' runs without weights.")
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help="folders of recipes/ (default: all)")
    parser.add_argument("--config", help="one run of one recipe: the name of its file")
    arguments = parser.parse_args(argv)
    try:
        for name in arguments.recipes or names():
            recipe, made = load_recipe(name), dict[tuple[torch.dtype, str], PreTrainedModel]()
            for run in [find_run(recipe, arguments.config)] if arguments.config else recipe.runs:
                print(f"{run.config} on {run.hardware} ({hardware(run.hardware).spec.accelerator}): {run.purpose}")
                found = dry_run_of(name, run, made)
                print(describe(found), end="\n\n", flush=True)
                if found.problem is not None:
                    raise MegaKVError(f"{name}/{run.config}: {found.problem}")
    except (ValueError, MegaKVError) as error:
        print(f"megakv: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
