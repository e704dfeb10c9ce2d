"""Hosts on one machine: network namespaces joined by rate-limited links, with ssh and a deepspeed hostfile.

    python scripts/hosts.py --hosts 2 --slots 2 --rate 1gbit -- \\
        deepspeed --hostfile {hostfile} --launcher pdsh --no_local_rank script.py ...

The command runs on the first host. When it ends, everything on the hosts ends, and they are gone. Needs root, and
Debian's iproute2, pdsh and openssh-server.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.hosts.cluster import Hosts  # noqa: E402
from tests.hosts.control import ask_rate  # noqa: E402
from tests.hosts.links import UNLIMITED  # noqa: E402
from tests.hosts.tools import unavailable  # noqa: E402


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, help="how many hosts (default 2)")
    parser.add_argument("--slots", type=int, default=1, help="ranks on each host, for the hostfile (default 1)")
    parser.add_argument(
        "--rate",
        default=UNLIMITED,
        help="limit of every host's link, each way, such as 1gbit; or one for each host, separated by commas "
        f"(default {UNLIMITED})",
    )
    parser.add_argument("--measure", action="store_true", help="first measure and print what every link carries")
    parser.add_argument("--check", action="store_true", help="only say whether this machine can make hosts, or why not")
    parser.add_argument("--set-rate", metavar="RATE", help="only change all limits; run it on one of the hosts")
    parser.add_argument("command", nargs="*", metavar="-- command", help="runs on the first host")
    arguments = parser.parse_args()
    if not (arguments.command or arguments.measure or arguments.check or arguments.set_rate):
        parser.error("nothing to do: give a command after --, or --measure")
    return arguments


def _leave(signum: int, frame: object) -> NoReturn:
    sys.exit(128 + signum)


def run(arguments: argparse.Namespace) -> int:
    """Make the hosts, run the command on the first, and return its exit status."""
    rates = arguments.rate.split(",")
    with Hosts(count=arguments.hosts, slots=arguments.slots, rate=rates[0] if len(rates) == 1 else rates) as hosts:
        if arguments.measure:
            for source, name in enumerate(hosts.names):
                target = (source + 1) % len(hosts.names)
                found = hosts.measure(source, target)
                speed, trip = f"{found.bits_per_s / 1e9:.3f} Gbit/s", f"round trip {found.round_trip_s * 1e6:.0f} us"
                print(f"{name} -> {hosts.names[target]}: {speed}, {trip}", flush=True)
        if not arguments.command:
            return 0
        returncode = hosts.start(arguments.command, capture=False).wait().returncode
        assert returncode is not None
        return returncode if returncode >= 0 else 128 - returncode


def main() -> int:
    """Entry."""
    arguments = parse_arguments()
    # An end by a signal must take the hosts' folder with it; processes and networks go in any case.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _leave)
    try:
        if arguments.check:
            reason = unavailable()
            print("hosts can be made on this machine" if reason is None else reason)
            return 0 if reason is None else 1
        if arguments.set_rate:
            ask_rate(arguments.set_rate)
            return 0
        return run(arguments)
    except (ValueError, RuntimeError) as error:
        print(f"hosts: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
