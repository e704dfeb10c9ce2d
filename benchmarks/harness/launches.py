"""A benchmark that starts its ranks more than once, and gathers what each launch found."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from .ranks import TIMED_OUT, rank_environment, start_ranks


class LaunchError(Exception):
    """A launch failed; its message is on the screen already."""

    def __init__(self, status: int):
        super().__init__(f"exit status {status}")
        self.status = status


class Start(Protocol):
    """How ranks are started: here, or on several hosts."""

    def __call__(
        self, arguments: argparse.Namespace, options: Sequence[str], *, ranks: int, timeout_s: float
    ) -> int: ...


def add_part_argument(parser: argparse.ArgumentParser) -> None:
    """Where rank 0 of a launch leaves what it found; for the process that starts the ranks, not for users."""
    parser.add_argument("--part", help=argparse.SUPPRESS)


class Launches:
    """The launches of one run of a benchmark, which share its time."""

    def __init__(self, arguments: argparse.Namespace):
        # This process writes the report in its ranks' name: on their accelerator.
        os.environ.update(rank_environment(arguments))
        self._arguments = arguments
        self._deadline = time.monotonic() + arguments.timeout

    def run(self, ranks: int, options: Sequence[str] = (), *, start: Start = start_ranks) -> dict[str, Any]:
        """Start ranks with further options and return what their rank 0 left with `leave_part`."""
        with tempfile.TemporaryDirectory(prefix="megakv-benchmark-") as folder:
            path = Path(folder) / "part.json"
            left = self._deadline - time.monotonic()
            if left <= 0:
                print(f"not done after --timeout {self._arguments.timeout:g} s; ended. Raise it.", file=sys.stderr)
                raise LaunchError(TIMED_OUT)
            status = start(self._arguments, [*options, "--part", str(path)], ranks=ranks, timeout_s=left)
            if status:
                raise LaunchError(status)
            part: dict[str, Any] = json.loads(path.read_text())
            return part


def leave_part(path: str, part: Mapping[str, Any]) -> None:
    """Leave what a launch found for the process that started it."""
    Path(path).write_text(json.dumps(part, allow_nan=False))
