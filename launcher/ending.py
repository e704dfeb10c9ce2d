"""The end of a rank: in order when its work is done, at once when something went wrong."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from megakv.distributed.mesh import stop_distributed


def leave(code: int) -> NoReturn:
    """End this process now, with what was printed but without a wait for connections to peers that may be gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


@contextmanager
def orderly_end() -> Iterator[None]:
    """Around all that a rank does: whatever engines it left behind, the world ends before the interpreter does.

    After an error nothing is ended in order, since that could wait for a rank that waits for this one: the process
    leaves, with the traceback on the screen and status 1, or with the status that it asked for.
    """
    try:
        yield
    except SystemExit as stop:
        if isinstance(stop.code, str):
            sys.stderr.write(f"{stop.code}\n")
        leave(stop.code if isinstance(stop.code, int) else int(stop.code is not None))
    except BaseException:
        sys.excepthook(*sys.exc_info())
        leave(1)
    stop_distributed()
