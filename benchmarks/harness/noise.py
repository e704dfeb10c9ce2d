"""A noisy neighbour on the link between two hosts: a paced flow in both directions, switched on and off by a file.

KV-Runahead's Section 5, Figure 11. Runs by itself, with no other module:
``noise.py HERE THERE BITS_PER_S SWITCH NAME`` on each of two hosts; the flow runs while the file SWITCH holds NAME.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from pathlib import Path

PORT = 5600
CHUNK = bytes(1 << 17)
POLL_S = 0.02
QUIET = "quiet"
"""What the switch holds while no flow runs."""


def switched_to(switch: Path) -> str:
    """What the switch holds; `QUIET` before it was ever set."""
    try:
        return switch.read_text()
    except OSError:
        return QUIET


def listen(here: str) -> None:
    """Take in everything that comes, without a look at it."""
    with socket.create_server((here, PORT)) as server:
        while True:
            link, _ = server.accept()
            threading.Thread(target=_take, args=(link,), daemon=True).start()


def _take(link: socket.socket) -> None:
    buffer = bytearray(len(CHUNK))
    with link:
        while link.recv_into(buffer, 0, socket.MSG_TRUNC):
            pass


def send(there: str, bits_per_s: float, switch: Path, name: str) -> None:
    """Send at a steady rate while the switch says so, in a connection of its own each time."""
    step_s = len(CHUNK) * 8 / bits_per_s
    while True:
        if switched_to(switch) != name:
            time.sleep(POLL_S)
            continue
        try:
            with socket.create_connection((there, PORT)) as link:
                due = polled = time.monotonic()
                while due - polled < POLL_S or switched_to(switch) == name:
                    if due - polled >= POLL_S:
                        polled = due
                    link.sendall(CHUNK)
                    # What the link did not take in its time is not made up for.
                    due = max(due + step_s, time.monotonic() - step_s)
                    time.sleep(max(0.0, due - time.monotonic()))
        except ConnectionError:
            time.sleep(POLL_S)


def main() -> None:
    """Both directions of one end."""
    here, there, bits_per_s, switch, name = sys.argv[1:]
    threading.Thread(target=send, args=(there, float(bits_per_s), Path(switch), name), daemon=True).start()
    listen(here)


if __name__ == "__main__":
    main()
