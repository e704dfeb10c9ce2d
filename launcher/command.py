"""The ``megakv`` command."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import FrameType, ModuleType
from typing import NoReturn

from megakv.base.errors import MegaKVError, require_extra
from megakv.launcher.commands import EXTRA_OF, SUMMARIES
from megakv.launcher.commands.fairkv import check_names
from megakv.launcher.process import UNREAD, handling
from megakv.tracking.files import check_outputs, write_whole
from megakv.version import __version__


def _parser(given: list[str]) -> argparse.ArgumentParser:
    """All commands by name; the arguments of the one that was given."""
    parser = argparse.ArgumentParser(prog="megakv", description="Long-context inference: its tools.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, summary in SUMMARIES.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name in given:
            if name in EXTRA_OF:
                require_extra(EXTRA_OF[name], f"megakv {name}")
            module = _module(name)
            module.add_arguments(command)
            command.set_defaults(run=module.run)
    return parser


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"megakv.launcher.commands.{name.replace('-', '_')}")


def main(argv: list[str] | None = None) -> int:
    """Entry of the console script."""
    try:
        try:
            with _terminations():
                return _run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read the output has seen enough. At its end the interpreter would try once more, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return UNREAD


def _check_values(words: list[str]) -> None:
    """Refuse an option with an empty value, which a shell makes of a variable that is not set."""
    for option, value in pairwise([*(part for word in words for part in word.split("=", 1)), "-"]):
        if option.startswith("--") and not value:
            raise ValueError(f"{option} '' is empty: leave it out, or give it a value")


@contextmanager
def _terminations() -> Iterator[None]:
    """Asked to end, or with its terminal gone, this process still puts away what it made: ranks, folders."""

    def end(signum: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(128 + signum)

    numbers = (signal.SIGTERM, signal.SIGHUP)
    with handling({number: end for number in numbers if signal.getsignal(number) is signal.SIG_DFL}):
        yield


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR


def _run(argv: list[str]) -> int:
    # DeepSpeed's warnings go to standard output, where they would stand before a result.
    logging.getLogger("DeepSpeed").addFilter(_is_error)
    try:
        check_names(argv[:2])
        arguments = _parser(argv[:1]).parse_args(argv)
        _check_values(argv)
        path = getattr(arguments, "result_file", None)
        check_outputs({"--json": path})
        result = arguments.run(arguments)
        if result is not None:
            text = json.dumps(result, indent=2)
            if path is not None:
                write_whole(path, text.encode())
            print(text)
    except BrokenPipeError:
        raise
    except (ValueError, MegaKVError, OSError) as error:
        print(f"megakv: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("megakv: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
