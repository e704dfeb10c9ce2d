"""Hosts with competing flows between them (KV-Runahead, Section 5, Figure 11)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from .links import LimitedLinks
from .noise import ELSEWHERE, pair_names

if TYPE_CHECKING:
    from tests.hosts.cluster import Hosts

SPARE_HOSTS = 2
SCRIPT = Path(__file__).with_name("noise.py")


class NoisyLinks(LimitedLinks):
    """Starts every rank on a host of its own, and what sends flows between neighbours, and between two further hosts.

    Flows have half the rate of the links, in both directions, and run between one pair of hosts at a time: the one that
    the file ``--switch`` names, which ranks write.
    """

    def __init__(self, rate: str):
        super().__init__(rate, spare=SPARE_HOSTS)

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
            command = [sys.executable, "-SP", str(SCRIPT), address, f"{bits_per_s / 2:.0f}", str(switch), *flows]
            stack.enter_context(_Companion(hosts.on_network(host, command)))
        return ["--switch", str(switch)]


class _Companion(AbstractContextManager["_Companion"]):
    """A process that ends with its block."""

    def __init__(self, command: Sequence[str]):
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        self._process.wait()
