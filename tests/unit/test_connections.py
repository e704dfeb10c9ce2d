"""Connections to other ranks are found, and so is their end."""

import socket
import subprocess
import sys
import time

from megakv.distributed.connections import PeerConnections, open_connections, own_endpoints


def test_connections_that_are_over_are_named_by_rank() -> None:
    earlier = open_connections()
    with socket.create_server(("127.0.0.1", 0)) as server:
        pairs = [(socket.create_connection(server.getsockname()), server.accept()[0]) for _ in range(3)]
    names = open_connections() - earlier
    assert len(names) == 6
    ends = [near.getsockname()[:2] for near, _ in pairs]
    assert {*ends} <= {*own_endpoints()}
    # As another process would say of its own ends: two connections with rank 1, one with rank 2.
    watched = PeerConnections(names, 0, [[], ends[:2], ends[2:]])
    assert watched and watched.over() == []
    assert not PeerConnections(frozenset(), 0, [[], ends[:2], ends[2:]])
    pairs[2][1].close()
    assert watched.over() == [2]
    # A descriptor that is used again is another connection's.
    with socket.socket():
        assert watched.over() == [2]
    pairs[0][1].close()
    assert watched.over() == [1, 2]
    for near, far in pairs:
        near.close()
        far.close()


WAITING = """
import sys, time
import megakv.distributed.peers
from megakv.distributed.connections import PeerConnections, open_connections, own_endpoints
import socket
megakv.distributed.peers.UNHEARD_SECONDS = 1.0
peer = megakv.distributed.peers.Peer(1, "there", 7, "")
watch = megakv.distributed.peers.PeerWatch(0, [megakv.distributed.peers.Peer.this(0), peer], 600)
server = socket.create_server(("127.0.0.1", 0))
near = socket.create_connection(server.getsockname())
far, _ = server.accept()
watch.connections = PeerConnections(open_connections(), 0, [[], [far.getsockname()[:2]]])
with watch.waiting("a quick one"):
    pass
for seconds in (1.5, 60):
    with watch.waiting(f"pass_kv of {seconds} s"):
        time.sleep(seconds)
    near.close()
    print("went on", flush=True)
"""


def test_a_wait_that_never_hears_of_a_lost_peer_ends_with_a_word() -> None:
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", WAITING], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1 and done.stdout == "went on\n", done.stderr
    said = "megakv: rank 0 ends because the connection to rank 1 (host there, pid 7) was lost during pass_kv of 60 s\n"
    assert said in done.stderr and time.monotonic() - begun < 40
