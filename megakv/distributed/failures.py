"""What one rank knows of failures, its own and others', and what follows: who must give up, and who has.

Every rank counts the steps that all ranks take alike: collectives over the whole mesh, and passes through the layers.
A rank that fails says at which step, and whether it had begun to exchange something there. Who is at that step, or
beyond it, waits for what will not come, and gives up too, unless it failed at the same place by itself, as all ranks do
where all are given the same wrong argument: then nobody waits, and nothing was exchanged by halves.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from megakv.base.errors import MegaKVError, PeerLostError

TEXT = 4000
"""Characters of an error's message that travel."""
MARKS = (
    *("gloo/transport", "Timed out", "timed out", "Timeout", "Connection reset", "Connection closed", "Broken pipe"),
    *("ncclRemoteError", "ncclSystemError", "remote process exited", "network error", "communicator was aborted"),
)
"""What gloo and NCCL write of connections that are over, and of peers that do not answer."""


def broke(error: BaseException) -> bool:
    """Whether an exchange failed because of a connection, or of a peer that did not answer: nothing else is a loss."""
    if not isinstance(error, RuntimeError) or isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, dist.DistNetworkError | dist.DistStoreError) or any(mark in str(error) for mark in MARKS)


@contextmanager
def joining() -> Iterator[None]:
    """Around what ranks exchange before anybody watches over them: a broken connection becomes a `PeerLostError`."""
    try:
        yield
    except BaseException as error:
        if broke(error):
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise PeerLostError(f"another rank was lost, or did not answer, before all had met: {reason}") from error
        raise


@dataclass(frozen=True)
class Failure:
    """That a rank gave up a call."""

    rank: int
    life: int
    """Of the mesh's groups, which are made anew after a failure."""
    step: int
    inside: bool
    """Whether it had begun that step: others may hold half of what it exchanged."""
    text: str
    cause: int | None = None
    """The rank whose failure made it give up; None if it failed by itself."""
    absent: tuple[int, ...] = ()
    """Ranks that it takes for lost."""

    @property
    def says(self) -> str:
        """What other ranks say of it."""
        return self.text if self.absent or self.cause is not None else f"rank {self.rank} failed: {self.text}"


class Failures:
    """The failures that one rank knows of. Safe to use from several threads.

    `life` is how often the groups were made anew, `step` the last step of this life that this rank has begun, `inside`
    whether it is in the middle of it, `cause` the rank on whose account it is giving up, and `own` its own failure, if
    it gave up its last call.
    """

    def __init__(self, rank: int, world_size: int):
        self.rank = rank
        self.life = self.step = 0
        self.inside = False
        self.cause: int | None = None
        self._absent: tuple[int, ...] = ()
        self._others = frozenset(range(world_size)) - {rank}
        self.own: Failure | None = None
        self._told: list[Failure] = []
        # Ranks whose process is gone, and whether one was ``lost`` or ``ended`` in good order.
        self._gone: dict[int, str] = {}
        self._changed = threading.Condition()

    # What is heard

    def take(self, message: dict[str, Any]) -> None:
        """A message of another rank, or about it."""
        kind, rank = message.pop("kind"), message["rank"]
        with self._changed:
            if kind == "failed":
                self._told.append(Failure(**{**message, "absent": tuple(message["absent"])}))
            else:
                # Who ended in good order closes its connections behind that.
                self._gone.setdefault(rank, kind)
            self._changed.notify_all()

    @property
    def lost(self) -> list[int]:
        """Ranks whose process is gone, without a word."""
        with self._changed:
            return sorted(rank for rank, kind in self._gone.items() if kind == "lost")

    @property
    def quiet(self) -> bool:
        """Whether nothing was heard that could matter."""
        return not self._told and not (self._gone and self.lost)

    def verdict(self, *, broken: bool = False) -> Failure | None:
        """The failure on whose account this rank has to give up; None if it can go on.

        Where a connection is `broken`, whoever failed broke it, though it was a step ahead.
        """
        with self._changed:
            ours = [told for told in self._told if told.life == self.life and self._concerns(told, broken)]
        # Who failed by itself says more than who followed.
        return min(ours, key=lambda told: told.cause is not None, default=None)

    def follow(self, failure: Failure) -> MegaKVError:
        """The error with which this rank gives up on account of another's failure."""
        self._absent, self.cause = failure.absent, failure.rank if failure.cause is None else failure.cause
        if self.rank in failure.absent:
            return PeerLostError(f"rank {failure.rank} gave up this one for lost: {failure.text}")
        if failure.absent:
            return PeerLostError(f"rank {self.rank}: {failure.text}")
        return MegaKVError(failure.says)

    def _concerns(self, told: Failure, broken: bool) -> bool:
        alike = self.own is not None and not (told.inside or self.own.inside) and self.own.step == told.step
        return (broken or told.step <= self.step) and not alike

    def wait(self, seconds: float) -> Failure | None:
        """`verdict` on a broken connection, which may be later than it. A lost process ends the wait, too."""
        with self._changed:
            self._changed.wait_for(lambda: self.verdict(broken=True) is not None or self.lost, seconds)
            return self.verdict(broken=True)

    # What this rank does

    def begin_step(self) -> None:
        """The next step that all ranks take."""
        self.step += 1

    def begin_pass(self) -> None:
        """A pass through the layers, in which ranks exchange what each of them takes its own way."""
        self.begin_step()
        self.inside = True

    def miss(self, ranks: Iterable[int]) -> None:
        """These do not answer any more."""
        self._absent = tuple(ranks)

    def fail(self, error: BaseException) -> dict[str, Any]:
        """This rank gives up with an error; returns the message that tells the others."""
        if not self.inside:
            self.step += 1
        text = str(error)
        if self.cause is None and not isinstance(error, PeerLostError):
            text = f"{type(error).__name__}: {text}"
        text = text.removeprefix(f"rank {self.rank}: ")[:TEXT]
        with self._changed:
            self.own = Failure(self.rank, self.life, self.step, self.inside, text, self.cause, self._absent)
        return {"kind": "failed", **asdict(self.own)}

    def settle(self, seconds: float) -> bool:
        """Wait until every other rank has given up too, or is gone; returns whether that is so."""

        def all_have() -> bool:
            return not self._others - self._gone.keys() - self._firsts().keys() - self._missed()

        with self._changed:
            return self._changed.wait_for(all_have, seconds)

    def give_up(self) -> None:
        """Who has not been heard of by now does not answer."""
        with self._changed:
            self._gone = dict.fromkeys(self._others - self._firsts().keys(), "lost") | self._gone

    # What follows

    @property
    def missing(self) -> list[int]:
        """Ranks that are gone, or do not answer: nothing can be done together any more."""
        return sorted(self._gone.keys() | self._missed())

    @property
    def apart(self) -> bool:
        """Whether ranks gave up at different places: what their groups still hold is of no use."""
        return any(one.inside or one.step != self.step for one in self._firsts().values())

    def renew(self, *, life: bool) -> None:
        """All ranks have given up; they go on, in a new `life` of the groups where they were apart."""
        with self._changed:
            # A rank may have gone on, and failed again, already.
            self._told = [told for told in self._told if (told.life, told.step) > (self.life, self.step)]
            self.own, self.cause, self.inside = None, None, False
            if life:
                self.life, self.step = self.life + 1, 0
                self._told = [told for told in self._told if told.life >= self.life]

    def _firsts(self) -> dict[int, Failure]:
        """The first failure of each rank in this life that has not been gone on from."""
        firsts: dict[int, Failure] = {} if self.own is None else {self.rank: self.own}
        for told in self._told:
            if told.life == self.life:
                firsts.setdefault(told.rank, told)
        return firsts

    def _missed(self) -> set[int]:
        """Ranks that somebody takes for lost; of those that take this one for lost, they themselves."""
        firsts = self._firsts().values()
        return {told.rank if rank == self.rank else rank for told in firsts for rank in told.absent} - {self.rank}
