"""What all ranks do together: rank 0 decides for all, and what fails on one fails on all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

from megakv.base.errors import MegaKVError
from megakv.distributed.comm import Communicator


class HasDigest(Protocol):
    """The content of a file."""

    def digest(self) -> str: ...


T = TypeVar("T")
F = TypeVar("F", bound=HasDigest | None)


class Agreement:
    """The one way in which the ranks of a mesh decide, and fail."""

    def __init__(self, comm: Communicator):
        self._comm = comm
        self._lock = threading.RLock()
        self._depth = 0

    @property
    def comm(self) -> Communicator:
        """How the ranks talk."""
        return self._comm

    @property
    def shared(self) -> bool:
        """Whether there are other ranks."""
        return self._comm.mesh.world_size > 1

    @property
    def under_way(self) -> bool:
        """Whether a call of this engine has not ended yet."""
        return self._depth > 0

    def decide(self, action: Callable[[], T]) -> T:
        """What rank 0 makes of it, on every rank; the others do not call it. Every rank must come here.

        If rank 0 failed it raises its own error, and the others a `MegaKVError`.
        """
        decided, failure = _tried(action) if self._comm.mesh.rank == 0 else (None, None)
        decided, message = self._comm.broadcast_object((decided, _message(failure)))
        _raise_first(failure, [message])
        return decided  # type: ignore[return-value]

    def together(self, action: Callable[[], T]) -> T:
        """What every rank makes of it; if any fails, all do. Every rank must come here.

        A failing rank raises its own error, the others a `MegaKVError` with the first failing rank's message.
        """
        result, failure = _tried(action)
        _raise_first(failure, self._comm.gather_objects(_message(failure)))
        return result  # type: ignore[return-value]

    def same_file(self, setting: str, load: Callable[[], F]) -> F:
        """What every rank reads from the file that a setting names; a `ValueError` where ranks have different ones.

        They would decide differently, and wait for each other. Every rank must come here.
        """
        record = self.together(load)
        digests = self._comm.gather_objects(None if record is None else record.digest())
        odd = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if odd:
            raise ValueError(
                f"{setting}: the file of rank {odd[0]} differs from that of rank 0; copy one to every host"
            )
        return record

    @contextmanager
    def call(self, survives: tuple[type[BaseException], ...] = (BaseException,)) -> Iterator[None]:
        """Around a call that all ranks make: an error on any of them ends it on all, wherever they are in it.

        Of an error that is none of those that the caller `survives`, the others hear as of a rank that was killed.
        """
        alone = not self.shared
        if not self._lock.acquire(blocking=alone):
            raise MegaKVError(
                "another thread's call of this engine is under way: ranks could take the two in different order; make "
                "one after the other, in the same order on every rank"
            )
        self._depth += 1
        outermost = not alone and self._depth == 1
        try:
            if outermost and self._comm.watch.failures.own is not None:
                self._comm.renew()
            try:
                yield
            except BaseException as error:
                if outermost and isinstance(error, survives):
                    self._comm.watch.give_up(error)
                elif outermost:
                    self._comm.watch.desert(error)
                raise
        finally:
            self._depth -= 1
            self._lock.release()


def _tried(action: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return action(), None
    except BaseException as error:
        return None, error


def _message(failure: BaseException | None) -> str | None:
    return None if failure is None else f"{type(failure).__name__}: {failure}"


def _raise_first(failure: BaseException | None, messages: Sequence[str | None]) -> None:
    """Raise this rank's own failure, or what the first of the others says."""
    if failure is not None:
        raise failure
    for rank, message in enumerate(messages):
        if message is not None:
            raise MegaKVError(f"rank {rank} failed: {message}")
