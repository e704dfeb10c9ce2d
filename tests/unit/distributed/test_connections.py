"""Connections of a process are found, and those that are named are ended."""

import socket

import pytest

from megakv.distributed.mesh import open_connections, shut


def test_named_connections_end_and_no_others() -> None:
    before = open_connections()
    with socket.create_server(("127.0.0.1", 0)) as server:
        kept, ended = ((socket.create_connection(server.getsockname()), server.accept()[0]) for _ in range(2))
        assert len(open_connections().keys() - before.keys()) == 5
    names = [name for name, number in open_connections().items() if number in {each.fileno() for each in ended}]
    assert len(names) == 2
    shut(names)
    for near, far in (ended, kept):
        near.settimeout(1.0)
        far.settimeout(1.0)
    assert ended[0].recv(1) == ended[1].recv(1) == b""
    kept[0].sendall(b"a")
    assert kept[1].recv(1) == b"a"
    for each in (*kept, *ended):
        each.close()
    # A descriptor that is used again is another connection's.
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        shut(names)
        near.settimeout(0.1)
        with pytest.raises(TimeoutError):
            near.recv(1)
        far.close()
