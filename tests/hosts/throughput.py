"""What a link carries, between a listener on one host and a sender on another. Runs by itself, with no other module."""

from __future__ import annotations

import json
import socket
import sys
import time

PORT = 5001
PINGS = 50
CHUNK = bytes(1 << 18)
# A new connection finds its speed first.
RAMP_SHARE = 0.5


def listen(seconds: float) -> None:
    """Serve one sender: return single bytes at once, then time what comes, and print the bits per second."""
    with socket.create_server(("", PORT)) as server:
        print("ready", flush=True)
        link, _ = server.accept()
    with link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(PINGS):
            link.sendall(link.recv(1))
        buffer = bytearray(1 << 20)
        received, arrivals = 0, []
        while count := link.recv_into(buffer):
            received += count
            arrivals.append((time.monotonic(), received))
            if arrivals[-1][0] - arrivals[0][0] > seconds:
                break
    print(json.dumps(_rate(arrivals)))


def _rate(arrivals: list[tuple[float, int]]) -> float:
    """Bits per second of the arrivals after the ramp; a bucket that filled while idle is spent by then."""
    begin, end = arrivals[0][0], arrivals[-1][0]
    first = next(index for index, (when, _) in enumerate(arrivals) if when >= begin + RAMP_SHARE * (end - begin))
    (start, before), (stop, total) = arrivals[first], arrivals[-1]
    return (total - before) * 8 / (stop - start)


def send(address: str) -> None:
    """Time round trips and print their median in seconds; then send until the listener has had enough."""
    with socket.create_connection((address, PORT)) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(PINGS):
            start = time.perf_counter()
            link.sendall(b"x")
            link.recv(1)
            trips.append(time.perf_counter() - start)
        print(json.dumps(sorted(trips)[PINGS // 2]))
        try:
            while True:
                link.sendall(CHUNK)
        except ConnectionError:
            return


if __name__ == "__main__":
    if sys.argv[1] == "listen":
        listen(float(sys.argv[2]))
    else:
        send(sys.argv[2])
