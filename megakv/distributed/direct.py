"""Small messages between processors: TCP connections between all ranks, read without going to sleep.

A step of decoding exchanges a few kilobytes several times in every layer. Gloo hands each such message from thread
to thread, which on two cores takes 0.4 to 2 ms. A rank that sends by itself, and looks for the answer until it is
there, has it in 5 to 20 us over a bare connection of one host. It goes to sleep after `SPIN_SECONDS`, or at once
where ranks have no core each.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import select
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megakv.distributed.health import accept_links, listen, reach

MESSAGE_BYTES = 8 << 20
"""Messages up to this size go this way."""
AT_ONCE_BYTES = 256 << 10
"""Of messages that could go on beside computation, those up to this size: waiting for them takes less than that."""
SPIN_SECONDS = 2e-3
Links = dict[int, socket.socket]


def connect_directly(rank: int, gather: Callable[[Any], list[Any]], *, world_size: int, hosts: Sequence[str]) -> Links:
    """A connection to every other rank by its number; none on any rank where one of them could not be had. Collective.

    `gather` gives every rank what all ranks passed to it; under `hosts` rank 0's host is reached.
    """
    with listen(world_size) as listener:
        own = [*_addresses(hosts), socket.gethostname()]
        token = secrets.token_hex(16)
        offers = gather((own, listener.getsockname()[1], token))
        links: Links = {}
        for peer in range(rank):
            addresses, port, word = offers[peer]
            if (link := reach(addresses, port, f"{word} {rank}\n".encode())) is not None:
                links[peer] = link
        reached = gather(len(links) == rank)
        if all(reached):
            links |= accept_links(listener, token, world_size - 1 - rank)
    if not all(gather(len(links) == world_size - 1)):
        for link in links.values():
            link.close()
        return {}
    for link in links.values():
        link.setblocking(False)
    return links


def _addresses(hosts: Sequence[str]) -> list[str]:
    """This host's addresses on the way to some hosts."""
    found = []
    for host in hosts:
        with suppress(OSError):
            family, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                # Of a datagram socket this sends nothing.
                probe.connect(address)
                found.append(probe.getsockname()[0])
    return found


def cores_suffice(neighbours: int) -> bool:
    """Whether so many ranks of this host may wait on cores of their own."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return neighbours <= cores


def exchange(
    links: Links, send: Mapping[int, Tensor], receive: Mapping[int, Tensor], *, timeout_s: float, spins: bool
) -> None:
    """Send a tensor to each of some ranks, and receive one of each of others: contiguous, on the processor.

    Messages between two ranks come in the order in which they were sent. A `DistNetworkError` says that a connection is
    over, or that nothing came within `timeout_s`.
    """
    out = {peer: _bytes(tensor) for peer, tensor in send.items() if tensor.numel()}
    into = {peer: _bytes(tensor) for peer, tensor in receive.items() if tensor.numel()}
    begun = 0.0
    try:
        while True:
            for peer in [*out]:
                if len(rest := _sent(links[peer], out.pop(peer))):
                    out[peer] = rest
            for peer in [*into]:
                if len(rest := _received(links[peer], peer, into.pop(peer))):
                    into[peer] = rest
            if not out and not into:
                return
            now = time.perf_counter()
            begun = begun or now
            if now - begun > timeout_s:
                raise dist.DistNetworkError(f"Timed out after {timeout_s:g} s")
            if not spins or now - begun > SPIN_SECONDS:
                _sleep(links, out, into, timeout_s - (now - begun))
            else:
                # Where there are more threads than cores, whoever is waited for may be waiting for this one.
                os.sched_yield()
    except OSError as error:
        raise dist.DistNetworkError(f"Connection closed: {error}") from error


def is_over(link: socket.socket) -> bool:
    """Whether the other end has closed it, or is gone. Never waits, whatever kind of connection it is."""
    try:
        return not link.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _sent(link: socket.socket, rest: memoryview) -> memoryview:
    """What is left after sending what fits."""
    try:
        return rest[link.send(rest) :]
    except BlockingIOError:
        return rest


def _received(link: socket.socket, peer: int, rest: memoryview) -> memoryview:
    """What is left after receiving what has come."""
    try:
        count = link.recv_into(rest)
    except BlockingIOError:
        return rest
    if not count:
        raise dist.DistNetworkError(f"Connection closed by rank {peer}")
    return rest[count:]


def _sleep(links: Links, out: Mapping[int, Any], into: Mapping[int, Any], seconds: float) -> None:
    """Until something can be sent or received, or the time is over."""
    poll = select.poll()
    for peer in out.keys() | into.keys():
        wanted = (select.POLLOUT if peer in out else 0) | (select.POLLIN if peer in into else 0)
        poll.register(links[peer], wanted)
    poll.poll(max(1.0, seconds * 1e3))


def _bytes(tensor: Tensor) -> memoryview:
    """A contiguous tensor's memory."""
    assert tensor.is_contiguous()
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
