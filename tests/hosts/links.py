"""The wires between hosts: one switch, a link to every host, a rate limit on each."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

from tests.hosts.namespace import Namespace
from tests.hosts.tools import find

INTERFACE = "eth0"
SUBNET = "10.77.0"
UNITS = {"": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
UNLIMITED = "unlimited"
# What a link that was idle may send at once: enough for the timer that refills it, too little to carry a message. With
# less than a packet before segmentation, 64 KiB, tbf would cut each into frames one by one, at a cost in processor time
# that network cards do not have.
BURST_S = 2e-4
LEAST_BURST_BYTES = 80000
# A queue that is never full: a lost packet would cost a retransmission time-out of 200 ms, which no real link does.
QUEUE = "50ms"


def parse_rate(rate: str | float | None) -> float | None:
    """Bits per second of a rate such as ``"1gbit"``, ``"250mbit"`` or ``1e9``; None for no limit.

    Raises
    ------
    ValueError
        If it is not one.
    """
    if rate is None or rate == UNLIMITED:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d+)?)([kmgt]?)(?:bit|bps)?", str(rate).lower())
    bits = float(found[1]) * UNITS[found[2]] if found else 0.0
    if bits < 1e4:
        raise ValueError(f"rate {rate!r}: allowed: bits per second such as '1gbit' or '250mbit', or {UNLIMITED!r}")
    return bits


class Links:
    """A switch and its links to hosts, which are `SUBNET`.1, .2 ... on it.

    Parameters
    ----------
    hosts : sequence of Namespace
        They are given an `INTERFACE` each.

    Raises
    ------
    RuntimeError
        If the devices cannot be made.
    """

    def __init__(self, hosts: Sequence[Namespace]):
        self.addresses = [f"{SUBNET}.{index + 1}" for index in range(len(hosts))]
        self._hosts = hosts
        self._switch = Namespace('"$1" link add name switch type bridge; "$1" link set switch up', find("ip"))
        try:
            for index, host in enumerate(hosts):
                self._connect(index, host)
        except BaseException:
            self.close()
            raise

    def _connect(self, index: int, host: Namespace) -> None:
        switch, port = str(self._switch.pid), f"port{index + 1}"
        _ip("link", "add", INTERFACE, "netns", str(host.pid), "type", "veth", "peer", "name", port, "netns", switch)
        self._switch.run(find("ip"), "link", "set", port, "master", "switch", "up")
        # Without link-local IPv6 addresses, a host has one address to choose from.
        host.run(find("ip"), "link", "set", INTERFACE, "addrgenmode", "none")
        host.run(find("ip"), "address", "add", f"{self.addresses[index]}/24", "dev", INTERFACE)
        host.run(find("ip"), "link", "set", INTERFACE, "up")

    def set_rate(self, index: int, rate: str | float | None) -> None:
        """Limit the link of a host, in each direction, or lift the limit.

        Raises
        ------
        ValueError
            If the rate is not one.
        """
        bits = parse_rate(rate)
        for place, device in ((self._hosts[index], INTERFACE), (self._switch, f"port{index + 1}")):
            if bits is not None:
                burst = max(LEAST_BURST_BYTES, int(bits / 8 * BURST_S))
                shape = ["rate", f"{bits:.0f}bit", "burst", f"{burst}b", "latency", QUEUE]
                place.run(find("tc"), "qdisc", "replace", "dev", device, "root", "tbf", *shape)
            elif " tbf " in place.run(find("tc"), "qdisc", "show", "dev", device):
                place.run(find("tc"), "qdisc", "delete", "dev", device, "root")

    def close(self) -> None:
        """Take the links away. May be called again."""
        self._switch.close()


def _ip(*arguments: str) -> None:
    done = subprocess.run([find("ip"), *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
