"""The ``megakv`` command."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from types import ModuleType

from megakv.errors import MegaKVError
from megakv.launcher.commands import SUMMARIES
from megakv.version import __version__


def _parser(given: list[str]) -> argparse.ArgumentParser:
    """All commands by name; the arguments of the one that was given."""
    parser = argparse.ArgumentParser(prog="megakv", description="Long-context inference: its tools.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, summary in SUMMARIES.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name in given:
            module = _module(name)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"megakv.launcher.commands.{name.replace('-', '_')}")


def main(argv: list[str] | None = None) -> int:
    """Entry of the console script."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser(argv[:1]).parse_args(argv)
    try:
        result = arguments.run(arguments)
        if result is not None:
            text = json.dumps(result, indent=2)
            if path := getattr(arguments, "result_file", None):
                from megakv.tracking.files import write_whole

                write_whole(path, text.encode())
            print(text)
    except (ValueError, MegaKVError, OSError) as error:
        print(f"megakv: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("megakv: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
