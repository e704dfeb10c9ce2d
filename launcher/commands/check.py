"""``megakv check``."""

from __future__ import annotations

import argparse
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("config", help="the JSON of a run")
    parser.add_argument("--json", dest="result_file", help="write the result to this file")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The ranks that a JSON wants, the methods that it may name, and all its settings."""
    from megakv.base.sections import registered
    from megakv.engine.config import MegaKVSection, load_config
    from megakv.engine.named_files import check_files

    config = load_config(arguments.config)
    check_files(config)
    return {
        "config": arguments.config,
        "ranks": config.cp_size * config.tp_size,
        "context_parallel": config.cp_size,
        "tensor_parallel": config.tp_size,
        "methods": registered(MegaKVSection, "megakv"),
        "settings": config.megakv.model_dump(mode="json", by_alias=True),
    }
