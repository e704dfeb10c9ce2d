"""What every job takes on the command line, and the settings of the run that it comes to."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megakv.base.errors import require_extra
from megakv.launcher.ranks import DTYPES, read_hostfile
from megakv.tracking.files import check_outputs

if TYPE_CHECKING:
    from megakv.engine.config import MegaKVConfig

KEYS = {
    "cp": ("megakv", "context_parallel", "size"),
    "tp": ("tensor_parallel", "tp_size"),
    "dtype": ("dtype",),
    "prefill": ("megakv", "context_parallel", "prefill"),
    "weights": ("megakv", "weights", "format"),
    "wandb": ("megakv", "tracking", "wandb", "project"),
}
"""Where the JSON has what an argument says."""
FILES = ("json", "timeline", "report")
"""Arguments that name a file to write."""
READ = ("config", "prompt_file", "api_key_file")
"""Arguments that name a file to read."""


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of whatever starts ranks with an engine: its run's settings."""
    parser.add_argument("--config", metavar="FILE", help="JSON: a DeepSpeed inference config with a megakv section")
    parser.add_argument("--cp", type=int, help="context-parallel ranks, which share the tokens (default 1)")
    parser.add_argument("--tp", type=int, help="tensor-parallel ranks, which share the heads (default 1)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), help="of weights and cache (default: the checkpoint's)")
    weights = "round a plain checkpoint's: int8, q4_1 or fp8 (default: as they are stored)"
    parser.add_argument("--weights", metavar="FORMAT", help=weights)
    parser.add_argument("--prefill", metavar="METHOD", help="how a prompt attends across ranks (default auto)")
    parser.add_argument("--wandb", metavar="PROJECT", help="log to this W&B project, offline unless logged in")


def add_settings_arguments(parser: argparse.ArgumentParser, *, max_new_tokens: int) -> None:
    """The arguments of whatever generates: its run's settings, and how tokens are chosen."""
    add_engine_arguments(parser)
    parser.add_argument("--prefill-chunk-size", type=int, help="tokens read at a time (default: the whole prompt)")
    parser.add_argument(
        "--max-new-tokens", type=int, default=max_new_tokens, help="tokens of an answer at most (default %(default)s)"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="0 decodes greedily (default)")
    parser.add_argument("--top-p", type=float, default=1.0, help="nucleus for sampling (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="seed for sampling (default 0)")


def add_lookup_argument(parser: argparse.ArgumentParser) -> None:
    """The argument of whatever answers questions: how many tokens a step may check."""
    parser.add_argument(
        "--prompt-lookup",
        type=int,
        metavar="N",
        help="look up to N next tokens of an answer up in the conversation, and check them in one step",
    )


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that every job takes."""
    add_settings_arguments(parser, max_new_tokens=64)
    add_lookup_argument(parser)
    parser.add_argument("--json", help="write the outcome to this file")
    parser.add_argument("--timeline", help="draw compute and communication of every rank to this PNG")
    parser.add_argument("--report", metavar="FILE", help="write the HTML page of megakv report about all answers")
    parser.add_argument(
        "--compare", action="store_true", help="also run plain transformers on rank 0 and compare tokens"
    )


def check_engine_arguments(arguments: argparse.Namespace) -> None:
    """Refuse impossible ones before anything starts."""
    _check_counts(arguments, "cp", "tp", "threads", "max_new_tokens", "prefill_chunk_size")
    if arguments.wandb is not None:
        from megakv.tracking.config import check_project

        check_project(arguments.wandb)


def _check_counts(arguments: argparse.Namespace, *names: str) -> None:
    for name in names:
        value = getattr(arguments, name, None)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: allowed: 1 or more")


def check_job_arguments(arguments: argparse.Namespace) -> None:
    """Refuse impossible ones before anything starts."""
    check_engine_arguments(arguments)
    _check_counts(arguments, "prompt_lookup")
    if not 0 <= arguments.temperature < math.inf:
        raise ValueError(f"--temperature {arguments.temperature}: allowed: 0 (greedy) or more")
    if not 0 < arguments.top_p <= 1:
        raise ValueError(f"--top-p {arguments.top_p}: allowed: above 0, up to 1")
    if not 0 <= arguments.seed < 1 << 63:
        raise ValueError(f"--seed {arguments.seed}: allowed: 0 or more, below 2^63")
    timeline = getattr(arguments, "timeline", None)
    if timeline is not None and Path(timeline).suffix.lower() != ".png":
        raise ValueError(f"--timeline {timeline}: allowed: a path that ends in .png")


def check_files(arguments: argparse.Namespace) -> None:
    """Make the folders of all files that are to be written; one that cannot be is refused now, not in the end."""
    for name in ("report", "timeline"):
        if getattr(arguments, name, None) is not None:
            require_extra("report", f"--{name}")
    outputs, inputs = (
        {f"--{name.replace('_', '-')}": getattr(arguments, name, None) for name in names} for names in (FILES, READ)
    )
    check_outputs(outputs, inputs)


def mesh_of(arguments: argparse.Namespace) -> tuple[int, int]:
    """Context- and tensor-parallel degree: of the JSON, else as asked for, for which little is imported.

    Raises ValueError where ranks would refuse the settings.
    """
    if arguments.config is None and arguments.prefill is None and arguments.weights is None:
        return arguments.cp or 1, arguments.tp or 1
    config = run_config(arguments)
    return config.cp_size, config.tp_size


def mesh_on_hosts(arguments: argparse.Namespace) -> tuple[int, int]:
    """Of the JSON, else as asked for, else all slots of the hostfile."""
    if arguments.config is None and arguments.cp is None and arguments.hostfile is not None:
        arguments.cp = max(1, sum(read_hostfile(arguments.hostfile).values()) // (arguments.tp or 1))
    return mesh_of(arguments)


def run_config(arguments: argparse.Namespace) -> MegaKVConfig:
    """The settings that --config and the arguments of `KEYS` come to; with --wandb, W&B is switched on."""
    from megakv.engine.config import load_config

    given = _given(arguments)
    if arguments.config is None or not given:
        config = load_config(_added({}, given) if arguments.config is None else arguments.config)
    else:
        config = load_config(run_settings(arguments))
        _check_agreement(config, given, arguments.config)
    config.megakv.tracking.wandb.enabled |= arguments.wandb is not None
    return config


def run_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The JSON of --config, and what the arguments of `KEYS` say where it has nothing; unchecked."""
    from megakv.engine.config import read_settings

    return _added({} if arguments.config is None else read_settings(arguments.config), _given(arguments))


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name in KEYS if (value := getattr(arguments, name)) is not None}


def _check_agreement(config: MegaKVConfig, given: dict[str, Any], source: str) -> None:
    """Refuse an argument that contradicts the JSON."""
    section = config.megakv
    held: dict[str, Any] = {"cp": config.cp_size, "tp": config.tp_size, "dtype": config.dtype}
    held |= {"prefill": section.context_parallel.prefill, "wandb": section.tracking.wandb.project}
    held["weights"] = section.weights.format
    for name, value in given.items():
        key = ".".join(KEYS[name])
        allowed = _short(held[name])
        if _short(value) != allowed:
            raise ValueError(
                f"--{name} {value} contradicts {key} = {allowed} of {source}: give --{name} {allowed}, or "
                "leave one of the two out"
            )


def _added(values: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """The JSON's values, and the given ones where it has none."""
    for name, value in given.items():
        section, (*path, key) = values, KEYS[name]
        for part in path:
            # DeepSpeed knows this section by another name too.
            part = "tp" if part == "tensor_parallel" and "tp" in section else part
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                break
        else:
            section.setdefault(key, value)
    return values


def _short(value: Any) -> Any:
    """A torch type by its name on the command line."""
    named = {long: short for short, long in DTYPES.items()}
    return named.get(str(value).removeprefix("torch."), value)
