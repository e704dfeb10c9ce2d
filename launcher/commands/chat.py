"""``megakv chat``: starts the ranks of a chat, and hands Ctrl-C on to the one that is typed to."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from megakv.launcher.process import handling
from megakv.launcher.prompts import read_text
from megakv.launcher.ranks import command_line, start_ranks
from megakv.launcher.settings import (
    add_lookup_argument,
    add_settings_arguments,
    check_job_arguments,
    mesh_of,
)


def add_arguments(parser: argparse.ArgumentParser, *, ranks: bool = True) -> None:
    """What the command takes; with `ranks`, as a user gives it."""
    if ranks:
        parser.add_argument("model", metavar="MODEL", help="directory or hub id of the model")
    else:
        parser.add_argument("--model", required=True)
    parser.add_argument("--document", metavar="FILE", help="UTF-8 text that is read first and that questions are about")
    parser.add_argument("--no-chat-template", action="store_true", help="feed texts as they are")
    add_settings_arguments(parser, max_new_tokens=512)
    add_lookup_argument(parser)
    parser.add_argument("--threads", type=int, help="threads of every rank (default: cores / ranks, on the CPU)")
    parser.add_argument("--pid-file", help=argparse.SUPPRESS)


def run(arguments: argparse.Namespace) -> None:
    """Chat until the user leaves."""
    check_job_arguments(arguments)
    document = read_text(arguments.document, "--document") if arguments.document else ""
    cp, tp = mesh_of(arguments)
    with tempfile.TemporaryDirectory(prefix="megakv-") as folder, _terminal_kept():
        arguments.pid_file = str(Path(folder) / "pid")
        if document and Path(arguments.document).is_fifo():
            # Was read once, which is all that can be had of it.
            arguments.document = str(Path(folder) / "document")
            Path(arguments.document).write_text(document, encoding="utf-8")
        with _interrupts_handed_on(Path(arguments.pid_file)):
            words = command_line(arguments)
            start_ranks("megakv.launcher.chat", words, ranks=cp * tp, threads=arguments.threads, stdin=None)


@contextmanager
def _interrupts_handed_on(pid_file: Path) -> Iterator[None]:
    """Ctrl-C is for the rank whose process the file names; before there is one, it ends the start."""

    def hand_on(signum: int, frame: FrameType | None) -> None:
        try:
            pid = int(pid_file.read_text())
        except (OSError, ValueError):
            raise KeyboardInterrupt from None
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGINT)

    # Stopped by Ctrl-Z, this process would leave the terminal to the shell and to the ranks at once.
    with handling({signal.SIGINT: hand_on, signal.SIGTSTP: signal.SIG_IGN}):
        yield


@contextmanager
def _terminal_kept() -> Iterator[None]:
    """Leave the terminal as it was, however a rank that edited a line in it has ended."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        yield
    finally:
        # It may be closed by now.
        with suppress(termios.error):
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
