"""Ranks on hosts of their own, made of network namespaces on this machine, with rate-limited links between them."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .noise import ELSEWHERE, pair_names
from .options import Options

if TYPE_CHECKING:
    from tests.hosts.cluster import Hosts

    from .world import World

TIMED_OUT = 124
SPARE_HOSTS = 2
NOISE = Path(__file__).with_name("noise.py")
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


def checked_rates(options: Options, name: str, text: str) -> list[str]:
    """Rates such as ``free,1gbit``; ends with a message if links cannot have one of them."""
    _find_hosts()
    rates = text.split(",")
    try:
        from tests.hosts.links import parse_rate

        for rate in set(rates) - {FREE}:
            parse_rate(rate)
    except ImportError:
        return rates
    except ValueError as error:
        options.error(f"{name}: {error}")
    return rates


def set_rate(rate: str, world: World) -> None:
    """Give every host's link this rate. All ranks must call it, with nothing under way."""
    from tests.hosts.control import ask_rate

    if world.rank == 0:
        ask_rate(rate)
    world.barrier()


class LimitedLinks:
    """Starts every rank on a host of its own, or equal shares of them on each of several."""

    spare = 0
    """Further hosts, without ranks."""

    def __init__(self, rate: str, *, hosts: int | None = None):
        self.rate = rate
        self.hosts = hosts

    def __call__(self, arguments: argparse.Namespace, options: Sequence[str], *, ranks: int, timeout_s: float) -> int:
        """As `harness.launch.start_ranks`; what ranks print is shown if they fail."""
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


class NoisyLinks(LimitedLinks):
    """The same beside competing flows (KV-Runahead, Section 5, Figure 11), between neighbours or two further hosts.

    Flows have half the rate of the links, in both directions, and run between one pair of hosts at a time: the one that
    the file ``--switch`` names, which ranks write.
    """

    spare = SPARE_HOSTS

    def accompany(self, hosts: Hosts, ranks: int, stack: ExitStack) -> list[str]:
        from tests.hosts.links import parse_rate

        bits_per_s = parse_rate(self.rate)
        assert bits_per_s is not None, "links without a limit have no half rate"
        switch = hosts.folder / "switch"
        pairs = {name: (rank, rank + 1) for rank, name in enumerate(pair_names(ranks))}
        pairs[ELSEWHERE] = ranks, ranks + 1
        for host, address in enumerate(hosts.addresses):
            flows = [
                f"{name}={hosts.addresses[other]}"
                for name, pair in pairs.items()
                for other in pair
                if host in pair and other != host
            ]
            command = [sys.executable, "-SP", str(NOISE), address, f"{bits_per_s / 2:.0f}", str(switch), *flows]
            stack.enter_context(_running(hosts.on_network(host, command)))
        return ["--switch", str(switch)]


@contextmanager
def _running(command: Sequence[str]) -> Iterator[None]:
    """A process that ends with its block."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.kill()
        process.wait()


def _find_hosts() -> None:
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
