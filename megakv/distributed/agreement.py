"""What all ranks do together: rank 0 decides for all, and what fails on one fails on all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from megakv.distributed.comm import Communicator
from megakv.errors import MegaKVError

T = TypeVar("T")


class Agreement:
    """The one way in which the ranks of a mesh decide, and fail."""

    def __init__(self, comm: Communicator):
        self._comm = comm
        self._lock = threading.RLock()
        self._depth = 0

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
        failure: BaseException | None = None
        decided: T | None = None
        if self._comm.mesh.rank == 0:
            try:
                decided = action()
            except BaseException as error:
                failure = error
        message = None if failure is None else f"{type(failure).__name__}: {failure}"
        decided, message = self._comm.broadcast_object((decided, message))
        if failure is not None:
            raise failure
        if message is not None:
            raise MegaKVError(f"rank 0 failed: {message}")
        return decided  # type: ignore[return-value]

    def together(self, action: Callable[[], T]) -> T:
        """What every rank makes of it; if any fails, all do (`Communicator.agree`). Every rank must come here."""
        failure: BaseException | None = None
        result: T | None = None
        try:
            result = action()
        except BaseException as error:
            failure = error
        self._comm.agree(failure)
        return result  # type: ignore[return-value]

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around a call that all ranks make: an error on any of them ends it on all, wherever they are in it."""
        alone = not self.shared
        if not self._lock.acquire(blocking=alone):
            raise MegaKVError(
                "another thread's call of this engine is under way: ranks could take the two in different order; make "
                "one after the other, in the same order on every rank"
            )
        self._depth += 1
        try:
            if alone or self._depth > 1:
                yield
            else:
                with self._failing_together():
                    yield
        finally:
            self._depth -= 1
            self._lock.release()

    @contextmanager
    def _failing_together(self) -> Iterator[None]:
        if self._comm.failures.own is not None:
            self._comm.renew()
        try:
            yield
        except BaseException as error:
            self._comm.watch.give_up(error)
            raise
