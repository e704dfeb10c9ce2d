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
from megakv.distributed.channel import Channel, make_channels
from megakv.distributed.compat import all_gather_single, inference_all_reduce, store_hosts
from megakv.distributed.direct import AT_ONCE_BYTES, MESSAGE_BYTES, cores_suffice, exchange
from megakv.distributed.failures import joining
from megakv.distributed.health import connect
from megakv.distributed.ledger import Ledger
from megakv.distributed.mesh import Mesh, gathered
from megakv.distributed.peers import Peer, PeerWatch

T = TypeVar("T")
SUMMED = (torch.float32, torch.bfloat16, torch.float16)
"""Types that DeepSpeed's op sums in shared memory."""
Over = Literal["cp", "tp", "world"]
Collective = Callable[[dist.ProcessGroup], object]
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
        with self.comm.watch.guard(self.peers, self.operation, self.layer):
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

    def renew(self) -> None:
        """Go on where every rank has given up: in new groups, if they did so at different places. Collective.

        A `PeerLostError` says that a rank is gone.
        """
        if missing := self.watch.failures.missing:
            raise PeerLostError(
                f"rank {self.mesh.rank}: {self.watch.describe(*missing)} did not come back after an earlier failure; "
                "start all ranks again, or make a new engine with megakv.init_inference on all of them"
            )
        if apart := self.watch.failures.apart:
            self.watch.sever()
        # First: a rank that makes its next call later is waited for, whatever became of the groups before.
        self.watch.failures.renew(life=apart)
        if apart:
            with self.watch.guard(range(self.mesh.world_size), "making groups anew", None):
                self.mesh.renew()
                self.channels = self._made_channels()
            self.watch.severed = False

    def _made_channels(self) -> dict[Over, Channel]:
        """Those of groups of several ranks, where ranks have connections of their own."""
        groups = {over: tuple(self._members(over)[1]) for over in OVER if self.mesh.links}
        links, timeout_s = self.mesh.links, self.mesh.timeout_s
        return make_channels(groups, self.mesh.rank, self._gathered, links, spins=self._spins, timeout_s=timeout_s)

    def _gathered(self, value: T) -> list[T]:
        return gathered(value, self.mesh.group("world")) if self.mesh.world_size > 1 else [value]

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *ending: object) -> None:
        self.close()

    def close(self) -> None:
        """End the watch over peers, and the mesh with it."""
        self.watch.uninstall()
        self.channels = {}
        if self.watch.failures.own is not None or not self.watch.failures.quiet:
            # What is still expected from a peer would be waited for.
            self.watch.sever()
        self.mesh.end()

    def _members(self, over: Over) -> tuple[dist.ProcessGroup | None, Sequence[int]]:
        """A group, None where it has one rank, and its world ranks."""
        mesh = self.mesh
        ranks = mesh.cp_ranks if over == "cp" else mesh.tp_ranks if over == "tp" else range(mesh.world_size)
        return mesh.group(over), ranks

    def _collective(
        self, call: Collective, over: Over, operation: str, layer: int | None, sent: int, *, spins: bool = False
    ) -> None:
        """One over a group, in which this rank sends so many bytes; nothing where the group has one rank."""
        group, ranks = self._members(over)
        if group is None:
            return
        if over == "world":
            self.watch.failures.begin_step()
        dense = self.ledger.leave_dense()
        posted = self.ledger.mark()
        self.ledger.sent(operation, layer, sent)
        with self.watch.guard(ranks, operation, layer, spins=spins):
            call(group)
        self.ledger.transfer(operation, layer, posted, posted)
        if dense:
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
        with self.watch.guard(peers, operation, layer):
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
                at_once = not message.numel() or (self.direct(message) and message.nbytes <= AT_ONCE_BYTES)
                (small if at_once else large)[side][peer] = message
        # Receive before send, always: the other order halves gloo's throughput. NCCL needs both in one group.
        operations = [dist.P2POp(dist.irecv, message, peer, group) for peer, message in large[1].items()]
        operations += [dist.P2POp(dist.isend, message, peer, group) for peer, message in large[0].items()]
        works = dist.batch_isend_irecv(operations) if operations else []
        self._exchange(*small)
        return works

    def post_receive(self, buffer: Tensor, source: int, *, operation: str, layer: int | None) -> Transfer:
        """Start receiving one message from the context-parallel rank before or behind this one.

        Messages that `send` sends arrive in that order, each in the buffer posted in its turn: receives may be posted
        far ahead. The buffer is contiguous and of the message's size, and read once the transfer was waited for.
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
        with self.watch.guard((peer,), operation, layer):
            work = call(buffer, peer, self.mesh.edge_group(other))
        assert work is not None
        return Transfer(self, [work], operation, layer, (peer,), posted)

    def all_gather(
        self, tensor: Tensor, over: Over = "cp", *, operation: str, layer: int | None, receive: Tensor | None = None
    ) -> Tensor:
        """``[N, ...]`` the equally shaped tensors of all ranks of a group.

        They come in `receive`, contiguous and as large, where it is given.
        """
        ranks, channel = self._members(over)[1], self.channels.get(over)
        gathered = tensor.new_empty((len(ranks), *tensor.shape)) if receive is None else receive
        assert gathered.is_contiguous()
        if len(ranks) == 1:
            return gathered.copy_(tensor[None])

        def gather(group: dist.ProcessGroup) -> None:
            if channel is not None and self.direct(tensor):
                channel.all_gather(tensor.contiguous(), gathered)
            else:
                all_gather_single(gathered.view(-1), tensor.reshape(-1), group)

        self._collective(gather, over, operation, layer, tensor.nbytes * (len(ranks) - 1))
        return gathered

    def direct(self, tensor: Tensor) -> bool:
        """Whether a message is small enough for the ranks' own connections, if they have any: on all ranks alike."""
        return bool(self.mesh.links) and tensor.device.type == "cpu" and tensor.nbytes <= MESSAGE_BYTES

    def _exchange(self, send: Mapping[int, Tensor], receive: Mapping[int, Tensor]) -> None:
        exchange(self.mesh.links, send, receive, timeout_s=self.mesh.timeout_s, spins=self._spins)

    def cp_all_to_all(
        self, send: Tensor, send_counts: list[int], receive_counts: list[int], *, operation: str, layer: int | None
    ) -> Tensor:
        """Exchange pieces of a flat tensor, each rank its own part, with all context-parallel ranks."""
        if self.mesh.cp_size == 1:
            return send.clone()
        received = send.new_empty(sum(receive_counts))

        def exchange(_: dist.ProcessGroup) -> None:
            ranks, own = self.mesh.cp_ranks, self.mesh.cp_rank
            out = dict(zip(ranks, send.split(send_counts), strict=True))
            into = dict(zip(ranks, received.split(receive_counts), strict=True))
            into.pop(ranks[own]).copy_(out.pop(ranks[own]))
            for work in self._swap(out, into):
                work.wait()

        sent = (sum(send_counts) - send_counts[self.mesh.cp_rank]) * send.element_size()
        self._collective(exchange, "cp", operation, layer, sent)
        return received

    def all_reduce(
        self, tensor: Tensor, over: Over, how: Literal["sum", "max"] = "sum", *, operation: str, layer: int | None
    ) -> Tensor:
        """``sum`` or ``max`` over the ranks of a group, in place; in shared memory where that can be."""
        ranks, op = len(self._members(over)[1]), dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX
        # What a ring puts on the wire per rank.
        sent = -(-2 * tensor.nbytes * (ranks - 1) // ranks)
        # Others that op would leave as they are, without a word.
        summed = how == "sum" and tensor.dtype in SUMMED and tensor.is_contiguous()
        shared = over == "tp" and summed and self.mesh.shared_memory

        def reduce(group: dist.ProcessGroup) -> None:
            inference_all_reduce(tensor) if shared else dist.all_reduce(tensor, op=op, group=group)

        self._collective(reduce, over, operation, layer, sent, spins=shared)
        return tensor

    def broadcast(
        self, tensor: Tensor, source: int, over: Over = "world", *, operation: str, layer: int | None = None
    ) -> Tensor:
        """Overwrite `tensor` on every rank of a group with that of world rank `source`."""
        ranks, own = self._members(over)[1], self.mesh.rank
        sent = tensor.nbytes * (len(ranks) - 1) if own == source else 0

        def tell(group: dist.ProcessGroup) -> None:
            if not self.direct(tensor):
                dist.broadcast(tensor, source, group=group)
            elif own == source:
                self._exchange({rank: tensor for rank in ranks if rank != own}, {})
            else:
                self._exchange({}, {source: tensor})

        self._collective(tell, over, operation, layer, sent)
        return tensor

    def broadcast_object(self, value: T) -> T:
        """Rank 0's small object, on every rank."""
        if self.mesh.world_size == 1:
            return value
        first, device = self.mesh.rank == 0, self.mesh.device
        data = torch.frombuffer(bytearray(pickle.dumps(value if first else None)), dtype=torch.uint8).to(device)
        length = torch.tensor([len(data)], device=device)
        self.broadcast(length, 0, operation="control")
        message = data if first else torch.empty(int(self._arrived(length)), dtype=torch.uint8, device=device)
        self.broadcast(message, 0, operation="control")
        received: T = value if first else pickle.loads(self._arrived(message).numpy().tobytes())
        return received

    def _arrived(self, tensor: Tensor) -> Tensor:
        """What others sent, in host memory: on an accelerator, that is what is waited for."""
        if tensor.device.type == "cpu":
            return tensor
        with self.watch.guard(range(self.mesh.world_size), "control", None):
            return tensor.cpu()

    def gather_objects(self, value: T) -> list[T]:
        """One small object of every rank, on every rank."""
        self.watch.failures.begin_step()
        with self.watch.guard(range(self.mesh.world_size), "control", None):
            return self._gathered(value)

    def barrier(self) -> None:
        """Wait for all ranks."""
        self.gather_objects(None)

    def confirm(self) -> None:
        """Go on when every rank has computed all that it was asked for so far: one small message to each."""
        nothing = torch.zeros(1, dtype=torch.int64, device=self.mesh.device)
        self.all_gather(nothing, "world", operation="control", layer=None).cpu()
