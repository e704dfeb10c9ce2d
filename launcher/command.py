"""The ``megakv`` command: what needs no ranks."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from megakv.errors import MegaKVError


def info(arguments: argparse.Namespace) -> dict[str, Any]:
    """This machine, the versions in use, and the methods to choose from."""
    from megakv.attention.choice import DECODE, PREFILL
    from megakv.injection.policy import POLICIES
    from megakv.tracking import machine_info, version_info

    return {
        "machine": machine_info(),
        "versions": version_info(),
        "prefill": ["auto", *PREFILL],
        "decode": ["auto", *DECODE],
        "model types with a policy": sorted(POLICIES),
    }


def check(arguments: argparse.Namespace) -> dict[str, Any]:
    """Read a run's JSON and say how many ranks it wants."""
    from megakv.config import load_config

    config = load_config(arguments.config)
    return {
        "config": arguments.config,
        "ranks": config.cp_size * config.tp_size,
        "context_parallel": config.cp_size,
        "tensor_parallel": config.tp_size,
        "settings": config.megakv.model_dump(mode="json", by_alias=True),
    }


def timeline(arguments: argparse.Namespace) -> dict[str, Any]:
    """Draw a run's report, as a picture and as a trace for chrome://tracing or Perfetto."""
    from megakv.tracking import draw_timeline, load_report, write_trace

    report = load_report(arguments.report)
    draw_timeline(report, arguments.png)
    written = {"png": arguments.png}
    if arguments.trace:
        write_trace(report, arguments.trace)
        written["trace"] = arguments.trace
    return written


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="megakv", description="Long-context inference: tools that need no ranks.")
    commands = parser.add_subparsers(dest="command", required=True)
    for function, arguments in (
        (info, {}),
        (check, {"config": "the JSON of a run"}),
        (
            timeline,
            {
                "report": "a report that megakv.tracking.json wrote",
                "png": "picture to write",
                "--trace": "trace to write",
            },
        ),
    ):
        command = commands.add_parser(function.__name__, help=(function.__doc__ or "").splitlines()[0])
        for name, meaning in arguments.items():
            command.add_argument(name, help=meaning)
        command.add_argument("--json", help="write the result to this file")
        command.set_defaults(function=function)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Entry of the console script."""
    arguments = _parser().parse_args(argv)
    try:
        result = arguments.function(arguments)
        text = json.dumps(result, indent=2)
        if arguments.json:
            from megakv.tracking.files import write_whole

            write_whole(arguments.json, text.encode())
        print(text)
    except (ValueError, MegaKVError, OSError) as error:
        print(f"megakv: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
