"""Around everything that ranks exchange: a broken connection becomes an error that names who is lost, and when."""

from __future__ import annotations

from collections.abc import Sequence

from megakv.distributed.failures import broke
from megakv.distributed.peers import PeerWatch


class Guard:
    """Turn a broken connection or a time-out into an error that names the lost rank and what was going on.

    Where another rank gave up, its error comes instead. Any other error stays what it is. An operation that `spins`
    would never end by itself. Every message of every layer makes one: it is small.
    """

    __slots__ = ("_before", "_peers", "_spins", "_watch", "_where")

    def __init__(self, watch: PeerWatch, peers: Sequence[int], operation: str, layer: int | None, spins: bool = False):
        self._watch, self._peers, self._spins = watch, peers, spins
        self._where = operation if layer is None else f"{operation} of layer {layer}"

    def __enter__(self) -> None:
        try:
            self._watch.check(self._where)
        except BaseException:
            self._watch.failures.inside = True
            raise
        self._before = self._watch.enter_wait(self._where, spins=self._spins)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._watch.leave_wait(self._before)
        if error is not None:
            # Others may hold half of what was exchanged.
            self._watch.failures.inside = True
            if broke(error):
                raise self._watch.explain(error, self._peers, self._where) from error
