"""Every send, receive and collective of MegaKV: counted, ordered, timed out, and named in errors."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megakv.base.errors import PeerLostError
from megakv.distributed.channel import Channel, make_channel
from megakv.distributed.compat import all_gather_single, inference_all_reduce, store_hosts
from megakv.distributed.direct import AT_ONCE_BYTES, MESSAGE_BYTES, cores_suffice, exchange
from megakv.distributed.failures import Failures, joining
from megakv.distributed.guard import Guard
from megakv.distributed.health import connect
from megakv.distributed.ledger import Ledger
from megakv.distributed.mesh import Mesh
from megakv.distributed.peers import Peer, PeerWatch

T = TypeVar("T")
Over = Literal["cp", "tp", "world"]
OVER: tuple[Over, ...] = ("cp", "tp", "world")


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
    """Communication of one rank within its mesh; calls, bytes and times are counted in the ledger."""

    def __init__(self, mesh: Mesh, ledger: Ledger):
        self.mesh = mesh
        self.ledger = ledger
        try:
            with joining():
                peers = self._gathered(Peer.this(mesh.rank))
                hosts = store_hosts() if mesh.world_size > 1 else ()
                channel = connect(mesh.rank, self._gathered, world_size=mesh.world_size, hosts=hosts)
                self._spins = cores_suffice(sum(peer.host == peers[mesh.rank].host for peer in peers))
                self.channels = self._made_channels()
        except BaseException:
            mesh.end()
            raise
        self.watch = PeerWatch(mesh.rank, peers, mesh.timeout_s, mesh.sever, channel)

    @property
    def failures(self) -> Failures:
        """What is known of ranks that gave up."""
        return self.watch.failures

    def renew(self) -> None:
        """Go on where every rank has given up: in new groups, if they did so at different places. Collective.

        A `PeerLostError` says that a rank is gone.
        """
        if missing := self.failures.missing:
            raise PeerLostError(
                f"rank {self.mesh.rank}: {self.watch.describe(*missing)} did not come back after an earlier failure; "
                "start all ranks again, or make a new engine with megakv.init_inference on all of them"
            )
        apart = self.failures.apart
        if apart:
            self.watch.sever()
        # First: a rank that makes its next call later is waited for, whatever became of the groups before.
        self.failures.renew(life=apart)
        if apart:
            with self.guard(range(self.mesh.world_size), "making groups anew", None):
                self.mesh.renew()
                self.channels = self._made_channels()
            self.watch.severed = False

    def _made_channels(self) -> dict[Over, Channel]:
        """Those of groups of several ranks, where ranks have connections of their own."""
        found, made = dict[Over, Channel](), dict[Sequence[int], Channel | None]()
        for over in OVER if self.mesh.links else ():
            ranks = tuple(self._members(over)[1])
            if len(ranks) > 1 and ranks not in made:
                made[ranks] = make_channel(
                    ranks,
                    ranks.index(self.mesh.rank),
                    self._gathered,
                    self.mesh.links,
                    spins=self._spins,
                    timeout_s=self.mesh.timeout_s,
                )
            if (channel := made.get(ranks)) is not None:
                found[over] = channel
        return found

    def _gathered(self, value: T) -> list[T]:
        values: list[Any] = [value] * self.mesh.world_size
        if self.mesh.world_size > 1:
            dist.all_gather_object(values, value, self.mesh.group("world"))
        return values

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *ending: object) -> None:
        self.close()

    def close(self) -> None:
        """End the watch over peers, and the mesh with it."""
        self.watch.uninstall()
        self.channels = {}
        if self.failures.own is not None or not self.failures.quiet:
            # What is still expected from a peer would be waited for.
            self.watch.sever()
        self.mesh.end()

    def guard(self, peers: Sequence[int], operation: str, layer: int | None, *, spins: bool = False) -> Guard:
        """What is to be around an operation with some ranks."""
        return Guard(self.watch, peers, operation, layer, spins)

    def _members(self, over: Over) -> tuple[dist.ProcessGroup | None, Sequence[int]]:
        """A group, None where it has one rank, and its world ranks."""
        mesh = self.mesh
        ranks = mesh.cp_ranks if over == "cp" else mesh.tp_ranks if over == "tp" else range(mesh.world_size)
        return mesh.group(over), ranks

    def _collective(
        self,
        call: Callable[[dist.ProcessGroup], object],
        over: Over,
        operation: str,
        layer: int | None,
        sent: int,
        *,
        spins: bool = False,
    ) -> None:
        """One over a group, in which this rank sends so many bytes; nothing where the group has one rank."""
        group, ranks = self._members(over)
        if group is None:
            return
        if over == "world":
            self.failures.begin_step()
        self.ledger.leave_dense()
        posted = self.ledger.mark()
        self.ledger.sent(operation, layer, sent)
        with self.guard(ranks, operation, layer, spins=spins):
            call(group)
        self.ledger.transfer(operation, layer, posted, posted)
        self.ledger.enter_dense()

    # Between neighbours

    def shift(
        self, send: Tensor, receive: Tensor, *, operation: str, layer: int | None, steps: tuple[int, int] = (1, -1)
    ) -> Transfer:
        """Start passing a buffer to the next rank of the ring while receiving one from the previous rank.

        Both are contiguous. `steps` lead, around the ring, to the ranks that are sent to and received from.
        """
        ranks, own = self.mesh.cp_ranks, self.mesh.cp_rank
        following, previous = (ranks[(own + step) % len(ranks)] for step in steps)
        posted, peers = self.ledger.mark(), (previous, following)
        self.ledger.sent(operation, layer, send.nbytes)
        with self.guard(peers, operation, layer):
            works = self._swap({following: send}, {previous: receive})
        return Transfer(self, works, operation, layer, peers, posted)

    def _swap(self, send: Mapping[int, Tensor], receive: Mapping[int, Tensor]) -> list[dist.Work]:
        """Start messages to and from some context-parallel ranks; small ones have come when it returns.

        Both ends of a message know its size, and so which way it goes: over the ranks' own connections it takes some
        60 us, while gloo wakes threads for half a millisecond.
        """
        group = self.mesh.group("cp")
        small, large = [tuple[dict[int, Tensor], dict[int, Tensor]](({}, {})) for _ in range(2)]
        for side, messages in enumerate((send, receive)):
            for peer, message in messages.items():
                at_once = self._direct(message) and message.nbytes <= AT_ONCE_BYTES
                (small if at_once else large)[side][peer] = message
        # Receive before send, always: the other order halves gloo's throughput. NCCL needs both in one group.
        operations = [dist.P2POp(dist.irecv, message, peer, group) for peer, message in large[1].items()]
        operations += [dist.P2POp(dist.isend, message, peer, group) for peer, message in large[0].items()]
        works = dist.batch_isend_irecv(operations) if operations else []
        self._exchange(*small)
        return works

    def post_receive(self, buffer: Tensor, source: int, *, operation: str, layer: int | None) -> Transfer:
        """Start receiving one message from the context-parallel rank before or behind this one.

        What `send` sends between two ranks arrives in that order, each message into the buffer posted in its turn,
        whatever else they exchange: receives may be posted far ahead. The buffer is contiguous and of the message's
        size, and not to be read before the transfer was waited for.
        """
        return self._message(dist.irecv, buffer, source, operation, layer)

    def send(self, buffer: Tensor, destination: int, *, operation: str, layer: int | None) -> Transfer:
        """Start sending one message to the rank before or behind this one, without waiting for it to be received.

        The buffer is contiguous, and not to be written before the transfer was waited for.
        """
        self.ledger.sent(operation, layer, buffer.nbytes)
        return self._message(dist.isend, buffer, destination, operation, layer)

    def _message(
        self, call: Callable[..., dist.Work | None], buffer: Tensor, other: int, operation: str, layer: int | None
    ) -> Transfer:
        peer, posted = self.mesh.cp_ranks[other], self.ledger.mark()
        with self.guard((peer,), operation, layer):
            work = call(buffer, peer, self.mesh.edge_group(other))
        assert work is not None
        return Transfer(self, [work], operation, layer, (peer,), posted)

    # Collectives

    def cp_all_gather(
        self, tensor: Tensor, *, operation: str, layer: int | None, receive: Tensor | None = None
    ) -> Tensor:
        """``[N, ...]`` the equally shaped tensors of all context-parallel ranks.

        They come in `receive`, contiguous and as large, where it is given.
        """
        return self.all_gather(tensor, "cp", operation=operation, layer=layer, receive=receive)

    def all_gather(
        self, tensor: Tensor, over: Over, *, operation: str, layer: int | None, receive: Tensor | None = None
    ) -> Tensor:
        """The same of the ranks of any group."""
        ranks, own = self._members(over)[1], self.mesh.rank
        gathered = tensor.new_empty((len(ranks), *tensor.shape)) if receive is None else receive
        assert gathered.is_contiguous()
        if len(ranks) == 1:
            return gathered.copy_(tensor[None])

        def gather(group: dist.ProcessGroup) -> None:
            if not self._direct(tensor):
                all_gather_single(gathered.view(-1), tensor.reshape(-1), group)
                return
            whole, channel = tensor.contiguous(), self.channels.get(over)
            if channel is not None:
                channel.all_gather(whole, gathered)
                return
            others = [(index, rank) for index, rank in enumerate(ranks) if rank != own]
            gathered[ranks.index(own)].copy_(whole)
            self._exchange({rank: whole for _, rank in others}, {rank: gathered[index] for index, rank in others})

        self._collective(gather, over, operation, layer, tensor.nbytes * (len(ranks) - 1))
        return gathered

    def _direct(self, tensor: Tensor) -> bool:
        """Whether a message is small enough for the ranks' own connections, if they have any: on all ranks alike."""
        return bool(self.mesh.links) and tensor.device.type == "cpu" and tensor.nbytes <= MESSAGE_BYTES

    def _exchange(self, send: Mapping[int, Tensor], receive: Mapping[int, Tensor]) -> None:
        exchange(self.mesh.links, send, receive, timeout_s=self.mesh.timeout_s, spins=self._spins)

    def sum_in_order(self, tensor: Tensor, over: Over, *, operation: str, layer: int | None) -> Tensor:
        """The sum over the ranks of a group, the same bits on all of them, computed in float32 at least."""
        parts, wide = self.summands(tensor, over, operation=operation, layer=layer), _wide(tensor)
        return parts.sum(0, dtype=wide).to(tensor.dtype)

    def summands(self, tensor: Tensor, over: Over, *, operation: str, layer: int | None) -> Tensor:
        """``[N, ...]``, the same on all ranks of a group, whose sum is that over them.

        Small tensors are gathered: that takes one message of each to each, in place of two behind another. Of others it
        is the sum alone.
        """
        if self._direct(tensor):
            return self.all_gather(tensor, over, operation=operation, layer=layer)
        return self.all_reduce(tensor.to(_wide(tensor)), over, operation=operation, layer=layer).to(tensor.dtype)[None]

    def cp_all_to_all(
        self, send: Tensor, send_counts: list[int], receive_counts: list[int], *, operation: str, layer: int | None
    ) -> Tensor:
        """Exchange pieces of a flat tensor, each rank its own part, with all context-parallel ranks."""
        if self.mesh.cp_size == 1:
            return send.clone()
        received = send.new_empty(sum(receive_counts))

        def exchange(group: dist.ProcessGroup) -> None:
            if not self.mesh.links or send.device.type != "cpu":
                dist.all_to_all_single(received, send, receive_counts, send_counts, group)
                return
            ranks, own = self.mesh.cp_ranks, self.mesh.cp_rank
            out, into = (
                dict(zip(ranks, pieces, strict=True))
                for pieces in (send.split(send_counts), received.split(receive_counts))
            )
            into.pop(ranks[own]).copy_(out.pop(ranks[own]))
            for work in self._swap(out, into):
                work.wait()

        sent = (sum(send_counts) - send_counts[self.mesh.cp_rank]) * send.element_size()
        self._collective(exchange, "cp", operation, layer, sent)
        return received

    def all_reduce(
        self, tensor: Tensor, over: Over, how: Literal["sum", "max"] = "sum", *, operation: str, layer: int | None
    ) -> Tensor:
        """``sum`` or ``max`` over the ranks of a group, in place."""
        op = dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX
        sent = _all_reduce_bytes(tensor, len(self._members(over)[1]))
        self._collective(lambda group: dist.all_reduce(tensor, op=op, group=group), over, operation, layer, sent)
        return tensor

    def tp_all_reduce(self, tensor: Tensor, *, operation: str = "tp_all_reduce", layer: int | None = None) -> Tensor:
        """Sum over the tensor-parallel group, in place; in shared memory where that can be."""
        if not self.mesh.shared_memory:
            return self.all_reduce(tensor, "tp", operation=operation, layer=layer)
        sent = _all_reduce_bytes(tensor, self.mesh.tp_size)
        self._collective(lambda _: inference_all_reduce(tensor), "tp", operation, layer, sent, spins=True)
        return tensor

    def broadcast(
        self, tensor: Tensor, source: int, over: Over = "world", *, operation: str, layer: int | None = None
    ) -> Tensor:
        """Overwrite `tensor` on every rank of a group with that of world rank `source`."""
        ranks, own = self._members(over)[1], self.mesh.rank
        sent = tensor.nbytes * (len(ranks) - 1) if own == source else 0

        def tell(group: dist.ProcessGroup) -> None:
            if not self._direct(tensor):
                dist.broadcast(tensor, source, group=group)
            elif own == source:
                self._exchange({rank: tensor for rank in ranks if rank != own}, {})
            else:
                self._exchange({}, {source: tensor})

        self._collective(tell, over, operation, layer, sent)
        return tensor

    # Small objects, among all ranks

    def broadcast_object(self, value: T) -> T:
        """Rank 0's small object, on every rank."""
        values = [value]
        if self.mesh.world_size > 1:
            self.failures.begin_step()
            with self.guard(range(self.mesh.world_size), "control", None):
                if self.mesh.links:
                    return self._object_of_rank_zero(value)
                dist.broadcast_object_list(values, 0, group=self.mesh.group("world"))
        return values[0]

    def _object_of_rank_zero(self, value: T) -> T:
        """Its length and its bytes go in one message."""
        if self.mesh.rank == 0:
            data = pickle.dumps(value)
            message = torch.frombuffer(bytearray(len(data).to_bytes(8, "little") + data), dtype=torch.uint8)
            self._exchange(dict.fromkeys(range(1, self.mesh.world_size), message), {})
            return value
        length = torch.empty(1, dtype=torch.int64)
        self._exchange({}, {0: length})
        data_bytes = torch.empty(int(length), dtype=torch.uint8)
        self._exchange({}, {0: data_bytes})
        received: T = pickle.loads(data_bytes.numpy().tobytes())
        return received

    def gather_objects(self, value: T) -> list[T]:
        """One small object of every rank, on every rank."""
        self.failures.begin_step()
        with self.guard(range(self.mesh.world_size), "control", None):
            return self._gathered(value)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather_objects(None)

    def confirm(self) -> None:
        """Go on when every rank has computed all that it was asked for so far: one small message to each."""
        self.all_gather(self.device_tensor([0]), "world", operation="control", layer=None).cpu()

    def device_tensor(self, values: Sequence[float], dtype: torch.dtype = torch.int64) -> Tensor:
        """A small tensor where collectives can reach it."""
        return torch.tensor(values, dtype=dtype, device=self.mesh.device)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _all_reduce_bytes(tensor: Tensor, ranks: int) -> int:
    """What a ring all-reduce puts on the wire per rank."""
    return -(-2 * tensor.nbytes * (ranks - 1) // ranks)
