"""Ranks on hosts of their own, made of network namespaces on this machine, with rate-limited links between them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from .ranks import TIMED_OUT

if TYPE_CHECKING:
    from tests.hosts.cluster import Hosts

ROOT = Path(__file__).resolve().parents[2]
FREE = "free"
"""The name of no limit: all ranks on this machine, over its loopback."""
UNLIMITED = "unlimited"
"""Hosts as with a limit, whose links have none."""


def unavailable() -> str | None:
    """Why such hosts cannot be made here; None if they can."""
    _find_hosts()
    try:
        from tests.hosts.tools import unavailable as reason
    except ImportError as error:
        return f"the project's tests/hosts is needed: {error}"
    return reason()


def check_rate(rate: str) -> None:
    """Refuse a rate that links cannot have."""
    if rate == FREE:
        return
    _find_hosts()
    try:
        from tests.hosts.links import parse_rate
    except ImportError:
        return
    parse_rate(rate)


class LimitedLinks:
    """Starts every rank on a host of its own, or equal shares of them on each of several."""

    def __init__(self, rate: str, *, hosts: int | None = None, spare: int = 0):
        self.rate = rate
        self.hosts = hosts
        self.spare = spare

    def __call__(self, arguments: argparse.Namespace, options: Sequence[str], *, ranks: int, timeout_s: float) -> int:
        """As `harness.ranks.start_ranks`; what ranks print is shown if they fail."""
        from tests.hosts.cluster import Hosts

        env = {"OMP_NUM_THREADS": str(arguments.threads)}
        count = self.hosts or ranks
        made = Hosts(count=count, slots=ranks // count, rate=self.rate, env=env, spare=self.spare)
        with made as hosts, ExitStack() as stack:
            script = Path(sys.argv[0]).resolve()
            further = self.accompany(hosts, ranks, stack)
            result = hosts.start_deepspeed(script, *sys.argv[1:], *options, *further).wait(timeout_s)
        if result.returncode is None:
            print(f"{script.name}: not done after {timeout_s:.0f} s; ended. Raise --timeout.", file=sys.stderr)
            return TIMED_OUT
        if result.returncode:
            print(result.stdout[-4000:], result.stderr[-4000:], sep="\n", file=sys.stderr)
        return result.returncode

    def accompany(self, hosts: Hosts, ranks: int, stack: ExitStack) -> list[str]:
        """Start what runs on the hosts beside the ranks, to end with `stack`; returns further options of the ranks."""
        return []


def _find_hosts() -> None:
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
