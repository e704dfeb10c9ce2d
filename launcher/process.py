"""The life of a rank's process: who it is, what it says, and how it ends, so that nobody is left hanging."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from megakv.base.errors import MegaKVError, PeerLostError
from megakv.distributed.launchers import read_launch

PATIENCE_SECONDS = 10.0
"""How long another rank leaves the word to rank 0, whose exit makes the launcher end all ranks."""
UNREAD = 141
"""Status where nobody reads the output any more, as after ``| head``: that of a process that SIGPIPE ended."""
UNREAD_SECONDS = 1.0
"""How long such a rank leaves it to the command that started it to end all ranks."""


def own_rank() -> int:
    """This process's rank as its launcher said it, before any process group stands."""
    return read_launch().rank


def quiet_libraries() -> None:
    """Leave the screen to the run: libraries speak from warnings upwards, and on rank 0 only."""
    # They set their own levels when they are imported.
    import deepspeed  # noqa: F401
    import transformers  # noqa: F401

    level = logging.WARNING if own_rank() == 0 else logging.ERROR
    for name in ("DeepSpeed", "transformers", "torch", "accelerate"):
        logging.getLogger(name).setLevel(level)


@contextmanager
def importing() -> Iterator[None]:
    """Around large imports: what they make stays, and looking through it over and over takes a tenth of their time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def handling(handlers: Mapping[int, Any]) -> Iterator[None]:
    """Handle some signals so meanwhile."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave(code: int) -> NoReturn:
    """End this process now, with what was printed but without a wait for connections to peers that may be gone."""
    for stream in (sys.stdout, sys.stderr):
        # Perhaps nobody reads it any more.
        with suppress(OSError):
            stream.flush()
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
    from megakv.distributed.mesh import stop_distributed  # by now there, unless nothing was begun

    stop_distributed()


@contextmanager
def report_errors() -> Iterator[None]:
    """Report a user's error once; with or without one, end as `orderly_end` says.

    Wrong settings are seen by every rank alike, so rank 0 reports them. A lost peer is reported by whoever sees it.
    What only another rank knows is reported by it when rank 0 has stayed silent. That nobody reads what is printed is
    no error.
    """
    with orderly_end():
        try:
            yield
            # The interpreter would do it too late to be heard here.
            sys.stdout.flush()
        except BrokenPipeError:
            # At once, the others would say that they miss this rank.
            time.sleep(UNREAD_SECONDS)
            leave(UNREAD)
        except PeerLostError as error:
            # Said once: the launcher's SIGTERM would have the watch over peers say it again.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            sys.stderr.write(f"megakv: error: {error}\n")
            leave(1)
        except (ValueError, MegaKVError, OSError) as error:
            rank = own_rank()
            if rank != 0:
                # The launcher's SIGTERM is expected now: no word about rank 0 being lost.
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                time.sleep(PATIENCE_SECONDS)
            sys.stderr.write(f"megakv: error: {f'rank {rank}: ' if rank else ''}{error}\n")
            leave(1)
        except KeyboardInterrupt:
            if own_rank() == 0:
                sys.stderr.write("megakv: interrupted\n")
            leave(130)


@contextmanager
def rank_arguments(description: str | None, arguments_of: Callable[..., None]) -> Iterator[argparse.Namespace]:
    """Around all that a rank of a command does: what the rank was given; its errors are reported by `report_errors`."""
    parser = argparse.ArgumentParser(description=description)
    arguments_of(parser, ranks=False)
    arguments = parser.parse_args()
    quiet_libraries()
    with report_errors():
        yield arguments
