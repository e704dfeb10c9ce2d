"""The context-parallel x tensor-parallel mesh over the world: TP inside a node, CP across nodes."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import pairwise
from typing import Any, Literal, TypeVar
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from megakv.base.errors import CombinationError, MegaKVError
from megakv.distributed.compat import (
    end_deepspeed_distributed,
    init_deepspeed_distributed,
    shared_memory_available,
    store_hosts,
)
from megakv.distributed.direct import Links, connect_directly

T = TypeVar("T")
GroupName = Literal["world", "cp", "tp", "before", "behind"]
DESCRIPTORS = "/proc/self/fd"


@dataclass(frozen=True)
class Mesh:
    """This rank's place among all ranks.

    Rank ``r`` has tensor-parallel index ``r % tp_size`` and context-parallel index ``r // tp_size``: neighbours in rank
    order, which launchers put on one host, share a TP group. Every TP index has a CP group of its own, so a ring passes
    the KV heads of one shard.
    """

    rank: int
    world_size: int
    cp_size: int
    cp_rank: int
    tp_size: int
    tp_rank: int
    cp_ranks: tuple[int, ...]
    """World ranks of this rank's groups, by index, as are `tp_ranks`."""
    tp_ranks: tuple[int, ...]
    groups: dict[GroupName, ReferenceType[dist.ProcessGroup]]
    """Torch alone holds them: ending them ends their threads and connections, whoever still holds the mesh."""
    device: torch.device
    shared_memory: bool
    """Whether DeepSpeed's shared-memory all-reduce may serve the TP group. It ignores its group and works on one host
    only, so it is right exactly when the TP group is the whole world on one host."""
    timeout_s: float
    """How long a silent peer is waited for."""
    connections: set[str] = field(default_factory=set)
    """The TCP connections of groups and `links`, as `open_connections` names them."""
    links: Links = field(default_factory=dict)
    """Connections to all other ranks for small messages; none with an accelerator, or where one could not be had."""

    def edge_group(self, neighbour: int) -> dist.ProcessGroup | None:
        """This rank and the context-parallel rank before or behind it, for what goes down the chain between them.

        Each edge has its own: NCCL makes the messages of a group one after the other, so that a receive that was posted
        ahead would hold back every later send of the same group.
        """
        assert abs(neighbour - self.cp_rank) == 1, "send and post_receive reach neighbours alone; shift goes around"
        return self.group("before" if neighbour < self.cp_rank else "behind")

    def group(self, name: GroupName) -> dist.ProcessGroup | None:
        """This rank's group: ``world`` is all ranks, apart from the user's own; None where it has one rank."""
        if name not in self.groups:
            return None
        group = self.groups[name]()
        # None would be taken for a degree of 1: a sum over this rank for the sum over all.
        if group is None:
            raise MegaKVError("the process groups of this engine have ended; make a new one with megakv.init_inference")
        return group

    def end(self) -> None:
        """End this rank's groups: their threads are joined and their connections closed. The world stands."""
        for link in self.links.values():
            link.close()
        self.links.clear()
        for group in self._standing():
            dist.destroy_process_group(group)

    def sever(self) -> None:
        """Break this rank's groups: whatever waits in them fails, here and on the ranks that wait for this one."""
        shut(self.connections)
        for group in self._standing():
            # Gloo's own abort leaves those who wait where they are.
            if dist.get_backend(group) != "gloo":
                group.abort()

    def _standing(self) -> Iterator[dist.ProcessGroup]:
        for reference in self.groups.values():
            # A world that has ended has ended them, though somebody may hold them.
            if (group := reference()) is not None and dist.is_initialized():
                yield group

    def renew(self) -> None:
        """Make all groups anew, where ranks gave up at different places. Every rank must call it."""
        self.end()
        fresh = make_mesh(cp_size=self.cp_size, tp_size=self.tp_size, timeout_s=self.timeout_s)
        self.groups.update(fresh.groups)
        self.connections.clear()
        self.connections.update(fresh.connections)
        self.links.update(fresh.links)


def start_distributed(*, tp_only: bool, timeout_s: float) -> None:
    """Join the world, through DeepSpeed, unless the process group stands already.

    With `tp_only` the TP group is the whole world: DeepSpeed's shared-memory all-reduce is worth building.
    """
    try:
        init_deepspeed_distributed(shared_memory=tp_only, timeout=timedelta(seconds=timeout_s))
    except dist.DistError as error:
        # The lines behind the first are of torch's own stack.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if taken := re.search(r"port: (\d+).*EADDRINUSE", reason):
            raise MegaKVError(
                f"port {taken[1]} is in use on this host (EADDRINUSE), by another job or one that has not ended, so "
                "ranks cannot meet there: give another one (--master_port of deepspeed and torchrun, else MASTER_PORT)"
            ) from error
        raise MegaKVError(
            f"the ranks did not meet within megakv.timeout_s = {timeout_s:g}: {reason}; see that all were started, and "
            "reach MASTER_ADDR and MASTER_PORT"
        ) from error


def check_same_settings(settings: Mapping[str, Any]) -> None:
    """Refuse ranks of one world that were given different settings, which would wait for each other. Collective."""
    refuse_difference(gathered(dict(settings)), "configuration")


def refuse_difference(everywhere: Sequence[Mapping[str, Any]], what: str) -> None:
    """Refuse what ranks were given, nested mappings included, where it differs: a `ValueError` names the first key."""
    first, *others = (dict(_flat(settings)) for settings in everywhere)
    for rank, own in enumerate(others, start=1):
        for key in sorted(first.keys() | own.keys()):
            if first.get(key) != own.get(key):
                raise ValueError(
                    f"{key} is {first.get(key)!r} on rank 0 but {own.get(key)!r} on rank {rank}: give every rank the "
                    f"same {what}"
                )


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def stop_distributed() -> None:
    """End the world and every group in it, if one stands; engines cannot be used afterwards.

    For whoever owns the process, once nothing is exchanged any more. A process that does not may abort at its end:
    torch's communication threads let go of tensors, and so of Python objects, a moment after an operation counts as
    done, and the interpreter must still be there then. After a `PeerLostError` leave the process instead, as
    ``megakv.launcher.process`` does: whatever is still expected from the lost rank would be waited for here, for up to
    ``megakv.timeout_s``.
    """
    if dist.is_initialized():
        end_deepspeed_distributed()


def check_world(*, cp_size: int, tp_size: int, tp_sizes: Callable[[], Collection[int]]) -> None:
    """Refuse degrees whose product is not the world size, with what would work: `tp_sizes` are those of the model."""
    wanted, started = cp_size * tp_size, dist.get_world_size()
    if wanted != started:
        fits = ", ".join(f"{started // tp} x {tp}" for tp in tp_sizes() if started % tp == 0)
        raise CombinationError(
            "whole",
            f"megakv.context_parallel.size = {cp_size} times tensor_parallel.tp_size = {tp_size} is {wanted}, but "
            f"{started} ranks were started: start {wanted} (deepspeed --num_accelerators {wanted}, torchrun "
            f"--nproc-per-node {wanted}), or set CP x TP that {started} ranks can have: {fits}",
        )


def make_mesh(*, cp_size: int, tp_size: int, timeout_s: float) -> Mesh:
    """Create the groups of a mesh. Every rank must call it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    assert cp_size * tp_size == world_size, f"{cp_size} x {tp_size} on {world_size} ranks"
    timeout = timedelta(seconds=timeout_s)
    cp_rank, tp_rank = divmod(rank, tp_size)
    groups: dict[GroupName, ReferenceType[dist.ProcessGroup]] = {}
    before = open_connections()
    # new_group is collective over the world: every rank creates every group, in one order.
    if world_size > 1:
        groups["world"] = ref(dist.new_group(timeout=timeout))
    if cp_size > 1:
        for index in range(tp_size):
            ranks = [index + tp_size * step for step in range(cp_size)]
            group = dist.new_group(ranks, timeout=timeout)
            edges = [dist.new_group(list(edge), timeout=timeout) for edge in pairwise(ranks)]
            if index == tp_rank:
                groups["cp"] = ref(group)
                groups |= {"before": ref(edges[cp_rank - 1])} if cp_rank else {}
                groups |= {"behind": ref(edges[cp_rank])} if cp_rank < len(edges) else {}
    if tp_size > 1:
        for index in range(cp_size):
            group = dist.new_group([index * tp_size + step for step in range(tp_size)], timeout=timeout)
            if index == cp_rank:
                groups["tp"] = ref(group)
    accelerator = get_accelerator()
    device = torch.device(accelerator.current_device_name())
    links: Links = {}
    if world_size > 1 and device.type == "cpu":
        links = connect_directly(rank, gathered, world_size=world_size, hosts=store_hosts())
    return Mesh(
        rank=rank,
        world_size=world_size,
        cp_size=cp_size,
        cp_rank=cp_rank,
        tp_size=tp_size,
        tp_rank=tp_rank,
        cp_ranks=tuple(tp_rank + tp_size * step for step in range(cp_size)),
        tp_ranks=tuple(cp_rank * tp_size + step for step in range(tp_size)),
        groups=groups,
        device=device,
        shared_memory=tp_size == world_size and tp_size > 1 and shared_memory_available(),
        timeout_s=timeout_s,
        connections=open_connections().keys() - before.keys(),
        links=links,
    )


def gathered(value: T, group: dist.ProcessGroup | None = None) -> list[T]:
    """A small object of every rank of a group, on every rank: by default of the world."""
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def open_connections() -> dict[str, int]:
    """Descriptors of this process's sockets by names that tell each from all others, also from later ones."""
    found = {}
    for descriptor in os.listdir(DESCRIPTORS) if os.path.isdir(DESCRIPTORS) else ():
        with suppress(OSError):
            name = os.readlink(f"{DESCRIPTORS}/{descriptor}")
            if name.startswith("socket:"):
                found[name] = int(descriptor)
    return found


def shut(names: Collection[str]) -> None:
    """End these connections at both ends, whoever holds them: what waits for them fails."""
    for name, descriptor in open_connections().items():
        if name in names:
            with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
                # Looked at again: the descriptor may be another's by now. One that only listens has no peer.
                same = os.readlink(f"{DESCRIPTORS}/{connection.fileno()}") == name
                if same and connection.family != socket.AF_UNIX and connection.getpeername():
                    connection.shutdown(socket.SHUT_RDWR)
