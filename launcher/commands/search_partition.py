"""``megakv search-partition``: what it is asked for, and whether it can work."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megakv.launcher.ranks import command_line, start_ranks
from megakv.tracking.files import check_outputs

if TYPE_CHECKING:
    from megakv.engine.config import MegaKVConfig

MOST_TOKENS = 10**9
UNITS = 128
"""Units of a prompt unless --step says otherwise."""


def add_arguments(parser: argparse.ArgumentParser, *, ranks: bool = True) -> None:
    """What the command takes; its ranks all but their number."""
    add = parser.add_argument
    if ranks:
        add("--ranks", type=int, help="processes to start here (default: as many as the JSON wants)")
    add("--model", required=True, help="directory or hub id of the model")
    add("--config", required=True, help="JSON of the run that the partitions are for")
    add("--contexts", required=True, nargs="+", metavar="TOKENS", help="lengths of prompts: 4096,8192 or 4096 8192")
    add("--table", metavar="FILE", help="lookup table to write or extend (default: the config's)")
    add("--profile", metavar="FILE", help="of megakv profile: its prediction is where a search begins")
    add("--threads", type=int, default=1, help="threads of every rank (default 1)")
    add("--step", type=int, help=f"tokens of the finest stride (default about 1/{UNITS} of the prompt)")
    add("--repeats", type=int, default=2, help="passes of a promising partition (default 2)")
    add("--full-grid", action="store_true", help="first measure all points of every cell, as published: hundreds")
    add("--png", metavar="FILE", help="picture of the search (default: beside the table)")
    add("--local_rank", type=int, default=0, help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> None:
    """Start the ranks, which search and write the table."""
    config = search_config(arguments, arguments.ranks)
    check_search(arguments, config)
    try:
        ranks = config.cp_size * config.tp_size
        start_ranks("megakv.launcher.search", command_line(arguments), ranks=ranks, threads=arguments.threads)
    except KeyboardInterrupt:
        print(f"megakv: stopped; {arguments.table} has the lengths that were finished, if any", file=sys.stderr)
        raise


def read_contexts(words: Sequence[str]) -> list[int]:
    """The lengths of --contexts, ascending."""
    parts = [part for word in words for part in word.split(",") if part]
    for part in parts:
        if not part.isdecimal():
            raise ValueError(f"--contexts {part}: allowed: whole numbers of tokens, as in 4096,8192")
    if not parts:
        raise ValueError("--contexts names no length: allowed: whole numbers of tokens, as in 4096,8192")
    return sorted({int(part) for part in parts})


def search_config(arguments: argparse.Namespace, ranks: int | None = None) -> MegaKVConfig:
    """The run's JSON, with runahead as its method, whatever is to be searched left open, and so many ranks if given."""
    from megakv.engine.config import load_config
    from megakv.tracking.config import TrackingConfig

    config = load_config(arguments.config)
    parallel = config.megakv.context_parallel
    if ranks is not None:
        if ranks % config.tp_size:
            raise ValueError(f"--ranks {ranks}: allowed: multiples of tensor_parallel.tp_size = {config.tp_size}")
        parallel.size = ranks // config.tp_size
    if parallel.size < 2:
        raise ValueError(
            f"{arguments.config}: megakv.context_parallel.size = {parallel.size}: a chain has 2 ranks or more; "
            "set it, or give --ranks"
        )
    arguments.table = arguments.table or config.megakv.runahead.table
    if arguments.table is None:
        raise ValueError("--table is missing: no megakv.runahead.table in the config says where the result goes")
    arguments.profile = arguments.profile or parallel.profile
    parallel.prefill = "runahead"
    parallel.profile = None
    config.megakv.runahead.partition = "even"
    config.megakv.runahead.table = None
    config.megakv.tracking = TrackingConfig()
    return config


def check_search(arguments: argparse.Namespace, config: MegaKVConfig) -> None:
    """Refuse what cannot work before any rank starts."""
    from megakv.costmodel.hardware import load_profile
    from megakv.runahead.table import load_table

    for name in ("threads", "repeats", "step"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name} {value}: allowed: 1 or more")
    size = config.cp_size
    for context in read_contexts(arguments.contexts):
        if context < 2 * size:
            raise ValueError(f"--contexts {context}: allowed: {2 * size} or more, two tokens for each of {size} ranks")
        if context > MOST_TOKENS:
            raise ValueError(f"--contexts {context}: allowed: {MOST_TOKENS:,} or less")
        if arguments.step is not None and arguments.step * size > context:
            raise ValueError(
                f"--step {arguments.step}: allowed: {context // size} or less, for {context} tokens on {size} ranks"
            )
    if Path(picture_path(arguments)).resolve() == Path(arguments.table).resolve():
        raise ValueError(f"--table {arguments.table}: the picture would overwrite it: give --png another name")
    check_outputs({"--table": arguments.table, "--png": picture_path(arguments)}, make_folders=False)
    if arguments.profile is not None:
        load_profile(arguments.profile, setting="--profile")
    if Path(arguments.table).exists():
        chain = load_table(arguments.table, setting="--table").chain
        here = (size, config.tp_size, config.megakv.runahead.kv)
        if (chain.ranks, chain.tp, chain.kv) != here:
            raise ValueError(
                f"--table {arguments.table} is of {chain.ranks} ranks, tp {chain.tp}, kv {chain.kv!r}; this search "
                f"is of {here[0]} ranks, tp {here[1]}, kv {here[2]!r}: name another file"
            )


def picture_path(arguments: argparse.Namespace) -> str:
    """Where the picture goes."""
    return arguments.png or str(Path(arguments.table).with_suffix(".png"))


def default_unit(context: int, size: int) -> int:
    """A power of two, about a 128th of the prompt, that leaves every rank one or more."""
    return 1 << (max(1, context // max(UNITS, size)).bit_length() - 1)
