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

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    # Hosts are those of the project's own tests.
    sys.path.append(str(ROOT))
TIMED_OUT = 124
SPARE_HOSTS = 2  # Beside a competing flow, further ones without ranks
FREE, UNLIMITED = "free", "unlimited"
"""No limit: all ranks on this machine, over its loopback; hosts as with a limit, whose links have none."""


def unavailable() -> str | None:
    """Why such hosts cannot be made here; None if they can."""
    from tests.hosts.tools import unavailable as reason

    return reason()


def checked_rates(options: Options, name: str, text: str) -> list[str]:
    """Rates such as ``free,1gbit``; ends with a message if links cannot have one of them."""
    from tests.hosts.links import parse_rate

    rates = text.split(",")
    try:
        for rate in set(rates) - {FREE}:
            parse_rate(rate)
    except ValueError as error:
        options.error(f"{name}: {error}")
    return rates


def set_rate(rate: str, world: World) -> None:
    """Give every host's link this rate. All ranks must call it, with nothing under way."""
    from tests.hosts.control import ask_rate

    if world.rank == 0:
        ask_rate(rate)
    world.barrier()


def start_on_hosts(
    arguments: argparse.Namespace,
    options: Sequence[str],
    *,
    ranks: int,
    hosts: int,
    rate: str,
    noise: bool,
    timeout_s: float,
) -> int:
    """As `harness.launch.start_ranks`, with equal shares of the ranks on each host; what they print if they fail."""
    from tests.hosts.cluster import Hosts

    env = {"OMP_NUM_THREADS": str(arguments.threads)}
    made = Hosts(count=hosts, slots=ranks // hosts, rate=rate, env=env, spare=SPARE_HOSTS * noise)
    with made, ExitStack() as stack:
        further = start_noise(made, rate, ranks, stack) if noise else []
        script = Path(sys.argv[0]).resolve()
        result = made.start_deepspeed(script, *sys.argv[1:], *options, *further).wait(timeout_s)
    if result.returncode:
        print(result.stdout[-4000:], result.stderr[-4000:], sep="\n", file=sys.stderr)
    return TIMED_OUT if result.returncode is None else result.returncode


def start_noise(hosts: Hosts, rate: str, ranks: int, stack: ExitStack) -> list[str]:
    """Start a competing flow of half the rate (KV-Runahead, Figure 11), to end with `stack`; the ranks' option for it.

    The file ``--switch``, which ranks write, names the two hosts that it is between: neighbours, or spare ones.
    """
    from tests.hosts.links import parse_rate

    bits_per_s = parse_rate(rate)
    assert bits_per_s is not None, "links without a limit have no half rate"
    switch = hosts.folder / "switch"
    pairs = {name: (rank, rank + 1) for rank, name in enumerate(pair_names(ranks))} | {ELSEWHERE: (ranks, ranks + 1)}
    for host, address in enumerate(hosts.addresses):
        flows = [f"{name}={hosts.addresses[sum(pair) - host]}" for name, pair in pairs.items() if host in pair]
        script = str(Path(__file__).with_name("noise.py"))
        command = [sys.executable, "-SP", script, address, f"{bits_per_s / 2:.0f}", str(switch), *flows]
        process = subprocess.Popen(hosts.on_network(host, command), stdin=subprocess.DEVNULL)
        stack.callback(process.wait)
        stack.callback(process.kill)
    return ["--switch", str(switch)]
