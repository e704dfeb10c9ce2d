"""``megakv fairkv place``: from a user's prompts to a placement of heads that was measured; whether it can work."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megakv.launcher.commands.fairkv_map import step_times
from megakv.launcher.commands.fairkv_profile import add_measured_arguments, compress
from megakv.launcher.prompts import read_prompts
from megakv.launcher.ranks import command_line, start_ranks
from megakv.launcher.settings import add_settings_arguments, check_job_arguments, run_config
from megakv.tracking.files import check_outputs

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from megakv.engine.config import MegaKVConfig
    from megakv.fairkv.profile import BudgetProfile

BUDGET = 0.25
"""Where neither the arguments nor the JSON have one."""
RESULT = "result.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("model", metavar="MODEL", help="directory, GGUF file or hub id of the model")
    add_rank_arguments(parser)
    parser.add_argument("--threads", type=int, help="threads of every rank (default: cores / ranks, on the CPU)")


def add_rank_arguments(parser: argparse.ArgumentParser) -> None:
    """What its ranks take, too."""
    add_measured_arguments(parser, default=f" (default: the config's, else {BUDGET})")
    add_settings_arguments(parser, max_new_tokens=32)
    parser.add_argument(
        "--budgets", metavar="FILE", help="a profile of megakv fairkv profile, in place of measuring one"
    )
    parser.add_argument(
        "--copies", type=int, help="extra replicas of KV heads per layer, at most (default: --tp less 1)"
    )
    parser.add_argument(
        "--hardware", metavar="FILE", help="a known machine, or a JSON that megakv profile wrote, to predict steps"
    )
    parser.add_argument("--repeats", type=int, default=2, help="how often either placement reads a prompt (default 2)")
    parser.add_argument(
        "--out", default="runs/fairkv", help="folder for everything that is written (default runs/fairkv)"
    )
    parser.add_argument("--json", metavar="FILE", help=f"write the result to this file (default: {RESULT} in --out)")


def run(arguments: argparse.Namespace) -> None:
    """Start the ranks, which profile, map, compare, and write."""
    config = check(arguments)
    cp, tp, threads = config.cp_size, config.tp_size, arguments.threads
    print(f"megakv: {arguments.model}: {cp * tp} ranks on this machine, CP {cp} x TP {tp}", flush=True)
    del arguments.threads
    start_ranks("megakv.launcher.mapping_ranks", command_line(arguments), ranks=cp * tp, threads=threads)


def fairkv_config(arguments: argparse.Namespace) -> MegaKVConfig:
    """The settings of the run with heads in runs of neighbours."""
    config = run_config(arguments)
    budget = arguments.budget
    if budget is None and config.megakv.fairkv.budget is None:
        budget = BUDGET
    compress(config, arguments.method, budget)
    return config


def check(arguments: argparse.Namespace) -> MegaKVConfig:
    """Refuse what cannot work before any rank starts, make the folder, and settle how many copies there may be."""
    from megakv.fairkv.fair_copying import CopyLimits
    from megakv.weights.folder import local_directory, read_config
    from megakv.weights.placement import head_counts

    check_job_arguments(arguments)
    if arguments.repeats < 1:
        raise ValueError(f"--repeats {arguments.repeats}: allowed: 1 or more")
    if arguments.max_new_tokens < 2:
        raise ValueError(f"--max-new-tokens {arguments.max_new_tokens}: allowed: 2 or more, since steps are measured")
    config = fairkv_config(arguments)
    read_prompts(arguments.prompts, field=arguments.field)
    directory = local_directory(arguments.model, weights=False)
    model = read_config(directory)
    counts = head_counts(model)
    _check_degree(counts, config.tp_size)
    if arguments.copies is None:
        arguments.copies = config.tp_size - 1
    CopyLimits(config.tp_size, arguments.copies).check(counts[2])
    if arguments.hardware is not None:
        if config.cp_size > 1:
            raise ValueError(
                f"--hardware {arguments.hardware} predicts steps of tensor-parallel ranks alone, but --cp is "
                f"{config.cp_size}: leave out --hardware, and the placements are measured, or use --cp 1"
            )
        times = step_times(arguments.hardware, str(directory), tp_size=config.tp_size)
        times.check(counts[0], counts[2])
        own, measured = (str(each).removeprefix("torch.") for each in (config.dtype or model.dtype, times.model.dtype))
        if own not in (measured, "None"):
            raise ValueError(
                f"--hardware {arguments.hardware} predicts steps in {measured}, but this run (--dtype) is in {own}: "
                "use a profile of that type, or leave out --hardware"
            )
    if arguments.budgets is not None:
        read_budgets(arguments.budgets, arguments.model, model)
    check_outputs({"--out": str(Path(arguments.out) / RESULT)})
    check_outputs({"--json": arguments.json}, make_folders=False)
    return config


def read_budgets(path: str, name: str, model: PreTrainedConfig) -> BudgetProfile:
    """A profile that is of this model, as far as its config tells."""
    from megakv.fairkv.profile import load_budgets
    from megakv.weights.placement import head_counts

    profile = load_budgets(path, setting="--budgets")
    layers, _, kv_heads = head_counts(model)
    positions = getattr(model.get_text_config(), "max_position_embeddings", None)
    try:
        profile.check_model(name, layers, kv_heads)
        if profile.identity is not None and (other := profile.identity.other_sizes(model)) is not None:
            raise ValueError(f"is the profile of another model, {profile.model!r}: {other}; measure one of this model")
        if positions is not None:
            profile.check_length(positions)
    except ValueError as error:
        raise ValueError(f"--budgets = {path!r}: {error}") from error
    return profile


def _check_degree(counts: tuple[int, int, int], tp_size: int) -> None:
    """Refuse a tensor-parallel degree that does not split the heads evenly: there would be nothing to compare with."""
    from megakv.weights.placement import contiguous_head_map, tensor_parallel_sizes

    if tp_size == 1:
        sizes = ", ".join(str(size) for size in tensor_parallel_sizes(*counts[1:]) if size > 1)
        raise ValueError(
            f"tensor_parallel.tp_size = 1 (--tp): one rank has all heads, and waits for nobody; sizes that split "
            f"{counts[1]} query heads over {counts[2]} KV heads: {sizes or 'none'}"
        )
    contiguous_head_map(*counts, tp_size)
