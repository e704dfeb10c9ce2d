"""A noisy neighbour on the link between two hosts: a paced flow in both directions, switched on and off by a file.

KV-Runahead's Section 5, Figure 11. On each host runs this file by itself, with no other module:
``noise.py HERE BITS_PER_S SWITCH NAME=THERE ...``. A flow goes THERE while the file SWITCH holds NAME.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from threading import Thread

PORT = 5600
CHUNK = bytes(1 << 17)
POLL_S, SETTLE_S = 0.02, 0.15  # The latter for a flow to come to its rate, or for what is queued of it to pass
QUIET, ELSEWHERE, LINK = "quiet", "elsewhere", "link"
"""No flow; one between two hosts that no rank is on; one between two neighbours of the chain, in every run others."""


def pair_names(ranks: int) -> list[str]:
    """Names that the switch holds for the flows between neighbours."""
    return [f"{rank}-{rank + 1}" for rank in range(ranks - 1)]


def switched_to(switch: Path) -> str:
    """Content of the switch; `QUIET` before it was ever set."""
    try:
        return switch.read_text()
    except OSError:
        return QUIET


class Switch:
    """Says which flow runs, before every run of a method; the ranks' side of the file."""

    def __init__(self, path: Path, rank: int, ranks: int):
        self._path, self._rank = path, rank
        self._states = {QUIET: [QUIET], ELSEWHERE: [ELSEWHERE], LINK: pair_names(ranks)}
        self._runs = Counter[tuple[str, str]]()

    def next_run(self, method: str, noise: str) -> None:
        """Switch to a noise; each run beside a flow on a link has it on another one."""
        states = self._states[noise]
        if self._rank == 0:
            self._path.write_text(states[self._runs[method, noise] % len(states)])
        self._runs[method, noise] += 1
        time.sleep(SETTLE_S)


def listen(here: str) -> None:
    """Take in everything that comes, without a look at it."""
    with socket.create_server((here, PORT)) as server:
        while True:
            link, _ = server.accept()
            Thread(target=_take, args=(link,), daemon=True).start()


def _take(link: socket.socket) -> None:
    buffer = bytearray(len(CHUNK))
    with link:
        while link.recv_into(buffer, 0, socket.MSG_TRUNC):
            pass


def send(there: str, bits_per_s: float, switch: Path, name: str) -> None:
    """Send at a steady rate while the switch says so, each time through a new connection."""
    step_s = len(CHUNK) * 8 / bits_per_s
    while True:
        if switched_to(switch) != name:
            time.sleep(POLL_S)
            continue
        try:
            with socket.create_connection((there, PORT)) as link:
                due = time.monotonic()
                while switched_to(switch) == name:
                    for _ in range(max(1, round(POLL_S / step_s))):
                        link.sendall(CHUNK)
                        # What the link did not take in its time is not made up for.
                        due = max(due, time.monotonic() - step_s) + step_s
                        time.sleep(max(0.0, due - time.monotonic()))
        except ConnectionError:
            time.sleep(POLL_S)


def end_with(parent: int) -> None:
    """A benchmark that is killed ends no flow itself."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main() -> None:
    here, bits_per_s, switch, *flows = sys.argv[1:]
    for flow in flows:
        name, _, there = flow.partition("=")
        Thread(target=send, args=(there, float(bits_per_s), Path(switch), name), daemon=True).start()
    Thread(target=end_with, args=(os.getppid(),), daemon=True).start()
    listen(here)


if __name__ == "__main__":
    main()
