"""Ranks on hosts of their own, made of network namespaces on this machine, with rate-limited links between them."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
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
FREE, UNLIMITED = "free", "unlimited"
"""No limit: all ranks on this machine, over its loopback; hosts as with a limit, whose links have none."""


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

    spare = 0  # Further hosts, without ranks

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
            return TIMED_OUT
        if result.returncode:
            print(result.stdout[-4000:], result.stderr[-4000:], sep="\n", file=sys.stderr)
        return result.returncode

    def accompany(self, hosts: Hosts, ranks: int, stack: ExitStack) -> list[str]:
        """Start what runs beside the ranks, to end with `stack`; returns further options of the ranks."""
        return []


class NoisyLinks(LimitedLinks):
    """The same beside a competing flow of half their rate (KV-Runahead, Figure 11), between two hosts.

    The file ``--switch``, which ranks write, names the pair: two neighbours, or two hosts without ranks.
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
            process = subprocess.Popen(hosts.on_network(host, command), stdin=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
        return ["--switch", str(switch)]


def _find_hosts() -> None:
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
