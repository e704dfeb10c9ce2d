"""``megakv info``."""

from __future__ import annotations

import argparse
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("--json", dest="result_file", help="write the result to this file")


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The machine, versions and methods."""
    from megakv.attention.methods import decode_methods, prefill_methods
    from megakv.injection.policy import POLICIES
    from megakv.tracking.machine import machine_info, version_info

    return {
        "machine": machine_info(),
        "versions": version_info(),
        "prefill": ["auto", *prefill_methods()],
        "decode": ["auto", *decode_methods()],
        "model types with a policy": sorted(POLICIES),
    }
