"""``megakv fairkv profile``: what it is asked for, and whether it can work."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from megakv.launcher.prompts import read_prompts
from megakv.launcher.ranks import command_line, start_ranks
from megakv.tracking.files import check_outputs

if TYPE_CHECKING:
    from megakv.engine.config import MegaKVConfig

UNEVEN = ("ada_snapkv", "headkv")


def add_arguments(parser: argparse.ArgumentParser, *, ranks: bool = True) -> None:
    """What the command takes; its ranks all but their number."""
    if ranks:
        parser.add_argument("--ranks", type=int, help="processes to start here (default: as many as the JSON wants)")
    parser.add_argument("--model", required=True, help="directory or hub id of the model")
    parser.add_argument("--json", required=True, metavar="FILE", help="write the profile to this file")
    parser.add_argument("--png", metavar="FILE", help="draw the budgets to this file (default: beside the profile)")
    parser.add_argument("--config", metavar="FILE", help="JSON of the run that the profile is for (default: fp32)")
    add_measured_arguments(parser)
    parser.add_argument("--threads", type=int, default=1, help="threads of every rank (default 1)")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)


def add_measured_arguments(parser: argparse.ArgumentParser, *, default: str = "") -> None:
    """What is read, and how it is compressed; `default` says of the budget what else there is."""
    parser.add_argument(
        "--prompts",
        required=True,
        nargs="+",
        metavar="PATH",
        help="data sets: a .jsonl file with a prompt a line, a folder with a prompt a file, or one text file",
    )
    parser.add_argument("--method", choices=UNEVEN, help="compression (default: the config's, else ada_snapkv)")
    parser.add_argument(
        "--budget", type=float, help=f"what a KV head keeps on average, as in megakv.fairkv.budget{default}"
    )
    parser.add_argument("--field", default="prompt", help="of a .jsonl line's object, the prompt's (default prompt)")
    parser.add_argument("--no-chat-template", action="store_true", help="feed the texts as they are")


def run(arguments: argparse.Namespace) -> None:
    """Start the ranks, which write the profile and print its tables."""
    config = budget_config(arguments, arguments.ranks)
    check_budgets(arguments)
    ranks = config.cp_size * config.tp_size
    start_ranks("megakv.launcher.budget_ranks", command_line(arguments), ranks=ranks, threads=arguments.threads)


def budget_config(arguments: argparse.Namespace, ranks: int | None = None) -> MegaKVConfig:
    """The run's JSON with the compression that was asked for, on so many ranks, or those that it wants."""
    from megakv.engine.config import load_config

    config = load_config(arguments.config or {"dtype": "fp32"})
    if ranks is not None:
        if ranks < 1 or ranks % config.tp_size:
            raise ValueError(f"--ranks {ranks}: allowed: multiples of tensor_parallel.tp_size = {config.tp_size}")
        config.megakv.context_parallel.size = ranks // config.tp_size
    compress(config, arguments.method, arguments.budget)
    return config


def compress(config: MegaKVConfig, method: str | None, budget: float | None) -> None:
    """Give a run the compression that was asked for, without a mapping, and no tracking.

    A `ValueError` where heads would keep equally many tokens, or all.
    """
    from megakv.engine.config import load_config
    from megakv.tracking.config import TrackingConfig

    section = config.megakv
    given = {name: value for name, value in (("method", method), ("budget", budget)) if value is not None}
    # What heads keep does not depend on where they are.
    fairkv = section.fairkv.model_dump(exclude_unset=True, exclude={"mapping", "copies"}) | given
    section.fairkv = load_config({"megakv": {"fairkv": fairkv}}).megakv.fairkv
    if section.fairkv.budget is None:
        raise ValueError("--budget is missing, and the config has no megakv.fairkv.budget: nothing would be compressed")
    if section.fairkv.method not in UNEVEN:
        raise ValueError(
            f"megakv.fairkv.method = {section.fairkv.method!r} keeps the same number of tokens in every head of a "
            f"layer: there is nothing to profile; allowed: {', '.join(UNEVEN)}"
        )
    if section.offload.enabled:
        raise ValueError("megakv.offload.enabled = true is not supported while heads are profiled: leave it out here")
    section.tracking = TrackingConfig()


def check_budgets(arguments: argparse.Namespace) -> None:
    """Refuse what cannot work before any rank starts."""
    if arguments.threads < 1:
        raise ValueError(f"--threads {arguments.threads}: allowed: 1 or more")
    if Path(arguments.json).resolve() == Path(picture_path(arguments)).resolve():
        raise ValueError(f"--json {arguments.json} is where the picture would go: name it .json, or give --png")
    check_outputs({"--json": arguments.json, "--png": picture_path(arguments)}, make_folders=False)
    read_prompts(arguments.prompts, field=arguments.field)


def picture_path(arguments: argparse.Namespace) -> str:
    """Where the picture goes."""
    return arguments.png or str(Path(arguments.json).with_suffix(".png"))
