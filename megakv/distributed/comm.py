"""Every send, receive and collective of MegaKV: counted, ordered, timed out, and named in errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megakv.compat import all_gather_single, inference_all_reduce, store_hosts
from megakv.distributed.connections import PeerConnections, broke, own_endpoints
from megakv.distributed.failures import Failures
from megakv.distributed.health import connect
from megakv.distributed.ledger import Ledger
from megakv.distributed.mesh import Mesh
from megakv.distributed.peers import Peer, PeerWatch
from megakv.errors import MegaKVError, PeerLostError

T = TypeVar("T")


def nbytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


@dataclass
class Transfer:
    """Sends and receives under way that end together: one way, or both with the two neighbours of a ring."""

    comm: Communicator
    works: list[dist.Work]
    operation: str
    layer: int | None
    peers: tuple[int, ...]
    posted: Any

    def count_from_now(self) -> None:
        """Let its time begin here: it was posted ahead, or is only waited for to use its buffer again."""
        self.posted = self.comm.ledger.mark()

    def wait(self) -> None:
        """Block until what was received may be read and what was sent may be overwritten."""
        waited = self.comm.ledger.mark()
        with self.comm.guard(self.peers, self.operation, self.layer):
            for work in self.works:
                work.wait()
        self.comm.ledger.transfer(self.operation, self.layer, self.posted, waited)


class Communicator:
    """Communication of one rank within its mesh.

    Parameters
    ----------
    mesh : Mesh
        This rank's groups.
    ledger : Ledger
        Where calls, bytes and times are counted.
    """

    def __init__(self, mesh: Mesh, ledger: Ledger):
        self.mesh = mesh
        self.ledger = ledger
        self.watch = PeerWatch(mesh.rank, self._gathered(Peer.this(mesh.rank)), mesh.timeout_s, mesh.sever)
        self.watch.connections = self._peer_connections()
        if mesh.world_size > 1:
            self.watch.listen(connect(mesh.rank, self._gathered, world_size=mesh.world_size, hosts=store_hosts()))

    @property
    def failures(self) -> Failures:
        """What is known of ranks that gave up."""
        return self.watch.failures

    def renew(self) -> None:
        """Go on where every rank has given up: in new groups, if they did so at different places. Collective.

        Raises
        ------
        PeerLostError
            If a rank is gone.
        """
        if missing := self.failures.missing:
            named = ", ".join(map(self.watch.describe, missing))
            raise PeerLostError(
                f"rank {self.mesh.rank}: {named} did not come back after an earlier failure; start all ranks again, or "
                "make a new engine with megakv.init_inference on all of them"
            )
        apart = self.failures.apart
        # First: a rank that makes its next call later is waited for, whatever became of the groups before.
        self.watch.renew(life=apart)
        if apart:
            with self.guard(range(self.mesh.world_size), "making groups anew", None):
                self.mesh.renew()
                connections = self._peer_connections()
            self.watch.follow(connections)

    def _peer_connections(self) -> PeerConnections:
        return PeerConnections(self.mesh.connections, self.mesh.rank, self._gathered(own_endpoints()))

    def _gathered(self, value: T) -> list[T]:
        values: list[Any] = [value] * self.mesh.world_size
        if self.mesh.world_size > 1:
            dist.all_gather_object(values, value, self.mesh.all_group)
        return values

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *ending: object) -> None:
        self.close()

    def close(self) -> None:
        """End the watch over peers, and the mesh with it."""
        self.watch.uninstall()
        if self.failures.own is not None or not self.failures.quiet:
            # What is still expected from a peer would be waited for.
            self.watch.sever()
        self.mesh.end()

    @contextmanager
    def guard(self, peers: Sequence[int], operation: str, layer: int | None) -> Iterator[None]:
        """Turn a broken connection or a time-out into an error that names the lost rank and what was going on.

        Where another rank gave up, its error comes instead. Any other error stays what it is.
        """
        where = operation if layer is None else f"{operation} of layer {layer}"
        try:
            self.watch.check(where)
            with self.watch.waiting(where):
                yield
        except BaseException as error:
            # Others may hold half of what was exchanged.
            self.failures.inside = True
            if not broke(error):
                raise
            raise self.watch.explain(error, peers, where) from error

    def _timed(self, operation: str, layer: int | None, peers: Sequence[int], sent: int, call: Callable[[], T]) -> T:
        self.ledger.leave_dense()
        posted = self.ledger.mark()
        self.ledger.sent(operation, layer, sent)
        with self.guard(peers, operation, layer):
            result = call()
        self.ledger.transfer(operation, layer, posted, posted)
        self.ledger.enter_dense()
        return result

    # Context-parallel group

    def shift(self, send: Tensor, receive: Tensor, *, operation: str, layer: int | None) -> Transfer:
        """Start passing a buffer to the next rank of the ring while receiving one from the previous rank.

        Parameters
        ----------
        send, receive : Tensor
            Contiguous; `receive` has the size of what the previous rank sends.
        """
        mesh = self.mesh
        following = mesh.cp_ranks[(mesh.cp_rank + 1) % mesh.cp_size]
        previous = mesh.cp_ranks[(mesh.cp_rank - 1) % mesh.cp_size]
        posted = self.ledger.mark()
        self.ledger.sent(operation, layer, nbytes(send))
        peers = (previous, following)
        with self.guard(peers, operation, layer):
            # Receive before send, always: the other order halves gloo's throughput. NCCL needs both in one group.
            operations = [
                dist.P2POp(dist.irecv, receive, previous, mesh.cp_group),
                dist.P2POp(dist.isend, send, following, mesh.cp_group),
            ]
            works = dist.batch_isend_irecv(operations)
        return Transfer(self, works, operation, layer, peers, posted)

    def post_receive(self, buffer: Tensor, source: int, *, operation: str, layer: int | None) -> Transfer:
        """Start receiving one message from the context-parallel rank before or behind this one.

        What `send` sends between two ranks arrives in that order, each message into the buffer posted in its turn,
        whatever else they exchange: receives may be posted far ahead.

        Parameters
        ----------
        buffer : Tensor
            Contiguous and of the message's size; not to be read before the transfer was waited for.
        source : int
            Context-parallel rank.
        """
        mesh = self.mesh
        peer = mesh.cp_ranks[source]
        posted = self.ledger.mark()
        with self.guard((peer,), operation, layer):
            work = dist.irecv(buffer, peer, mesh.edge_group(source))
        assert work is not None
        return Transfer(self, [work], operation, layer, (peer,), posted)

    def send(self, buffer: Tensor, destination: int, *, operation: str, layer: int | None) -> Transfer:
        """Start sending one message to the rank before or behind this one, without waiting for it to be received.

        Parameters
        ----------
        buffer : Tensor
            Contiguous; not to be written before the transfer was waited for.
        destination : int
            Context-parallel rank.
        """
        mesh = self.mesh
        peer = mesh.cp_ranks[destination]
        posted = self.ledger.mark()
        self.ledger.sent(operation, layer, nbytes(buffer))
        with self.guard((peer,), operation, layer):
            work = dist.isend(buffer, peer, mesh.edge_group(destination))
        assert work is not None
        return Transfer(self, [work], operation, layer, (peer,), posted)

    def cp_all_gather(
        self, tensor: Tensor, *, operation: str, layer: int | None, receive: Tensor | None = None
    ) -> Tensor:
        """``[N, ...]`` the equally shaped tensors of all context-parallel ranks.

        They come in `receive`, contiguous and as large, where it is given.
        """
        mesh = self.mesh
        gathered = tensor.new_empty((mesh.cp_size, *tensor.shape)) if receive is None else receive
        if mesh.cp_group is None:
            gathered[0] = tensor
            return gathered
        sent = nbytes(tensor) * (mesh.cp_size - 1)
        self._timed(
            operation,
            layer,
            mesh.cp_ranks,
            sent,
            lambda: all_gather_single(gathered.view(-1), tensor.reshape(-1), mesh.cp_group),
        )
        return gathered

    def cp_all_to_all(
        self, send: Tensor, send_counts: list[int], receive_counts: list[int], *, operation: str, layer: int | None
    ) -> Tensor:
        """Exchange pieces of a flat tensor, each rank its own part, with all context-parallel ranks."""
        mesh = self.mesh
        received = send.new_empty(sum(receive_counts))
        if mesh.cp_group is None:
            return received.copy_(send)
        sent = (sum(send_counts) - send_counts[mesh.cp_rank]) * send.element_size()
        self._timed(
            operation,
            layer,
            mesh.cp_ranks,
            sent,
            lambda: dist.all_to_all_single(received, send, receive_counts, send_counts, mesh.cp_group),
        )
        return received

    def cp_broadcast(self, tensor: Tensor, *, operation: str, layer: int | None) -> Tensor:
        """Overwrite `tensor` on the ranks of the context-parallel group with that of the first."""
        mesh = self.mesh
        if mesh.cp_group is not None:
            first, group = mesh.cp_ranks[0], mesh.cp_group
            sent = nbytes(tensor) * (mesh.cp_size - 1) if mesh.cp_rank == 0 else 0
            self._timed(operation, layer, mesh.cp_ranks, sent, lambda: dist.broadcast(tensor, first, group=group))
        return tensor

    # Tensor-parallel group

    def tp_all_reduce(self, tensor: Tensor, *, operation: str = "tp_all_reduce", layer: int | None = None) -> Tensor:
        """Sum over the tensor-parallel group, in place."""
        mesh = self.mesh
        if mesh.tp_group is None:
            return tensor
        # What a ring all-reduce puts on the wire per rank.
        sent = math.ceil(2 * nbytes(tensor) * (mesh.tp_size - 1) / mesh.tp_size)
        if mesh.shared_memory:
            with self.watch.spinning(operation):
                self._timed(operation, layer, mesh.tp_ranks, sent, lambda: inference_all_reduce(tensor))
        else:
            self._timed(operation, layer, mesh.tp_ranks, sent, lambda: dist.all_reduce(tensor, group=mesh.tp_group))
        return tensor

    def tp_combine(self, tensor: Tensor, how: Literal["sum", "max"], *, operation: str, layer: int | None) -> Tensor:
        """``sum`` or ``max`` over the tensor-parallel group, in place."""
        mesh = self.mesh
        if mesh.tp_group is not None:
            op = dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX
            sent = math.ceil(2 * nbytes(tensor) * (mesh.tp_size - 1) / mesh.tp_size)
            self._timed(
                operation, layer, mesh.tp_ranks, sent, lambda: dist.all_reduce(tensor, op=op, group=mesh.tp_group)
            )
        return tensor

    # World

    def add_counts(self, counts: Tensor, over: Literal["cp", "world"], *, operation: str, layer: int | None) -> Tensor:
        """Sum an integer tensor, in place, over the context-parallel group or all ranks."""
        mesh = self.mesh
        group, ranks = (mesh.all_group, range(mesh.world_size)) if over == "world" else (mesh.cp_group, mesh.cp_ranks)
        if over == "world":
            self.failures.begin_step()
        if len(ranks) > 1:
            sent = math.ceil(2 * nbytes(counts) * (len(ranks) - 1) / len(ranks))
            self._timed(operation, layer, ranks, sent, lambda: dist.all_reduce(counts, group=group))
        return counts

    def broadcast(self, tensor: Tensor, source: int, *, operation: str) -> Tensor:
        """Overwrite `tensor` on every rank with that of world rank `source`."""
        mesh = self.mesh
        if mesh.world_size > 1:
            self.failures.begin_step()
            sent = nbytes(tensor) * (mesh.world_size - 1) if mesh.rank == source else 0
            everyone = range(mesh.world_size)
            group = mesh.all_group
            self._timed(operation, None, everyone, sent, lambda: dist.broadcast(tensor, source, group=group))
        return tensor

    def broadcast_object(self, value: T) -> T:
        """Rank 0's small object, on every rank."""
        values = [value]
        if self.mesh.world_size > 1:
            self.failures.begin_step()
            with self.guard(range(self.mesh.world_size), "control", None):
                dist.broadcast_object_list(values, 0, group=self.mesh.all_group)
        return values[0]

    def gather_objects(self, value: T) -> list[T]:
        """One small object of every rank, on every rank."""
        self.failures.begin_step()
        with self.guard(range(self.mesh.world_size), "control", None):
            return self._gathered(value)

    def agree(self, error: BaseException | None) -> None:
        """Let every rank fail if any does, with the same message, so that nobody waits for a rank that gave up.

        Raises
        ------
        MegaKVError
            With the first failing rank's message; on the failing rank itself the error it passed.
        """
        messages = self.gather_objects(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, message in enumerate(messages):
            if message is not None:
                raise MegaKVError(f"rank {rank} failed: {message}")

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather_objects(None)

    def device_tensor(self, values: Sequence[float], dtype: torch.dtype = torch.int64) -> Tensor:
        """A small tensor where collectives can reach it."""
        return torch.tensor(values, dtype=dtype, device=self.mesh.device)
