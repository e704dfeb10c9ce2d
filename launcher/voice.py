"""One message from rank 0, a non-zero exit from every rank, and nobody left hanging."""

from __future__ import annotations

import logging
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from megakv.errors import MegaKVError, PeerLostError
from megakv.launcher.ending import leave, orderly_end
from megakv.launcher.environment import own_rank

PATIENCE_SECONDS = 10.0
"""How long another rank leaves the word to rank 0, whose exit makes the launcher end all ranks."""


def quiet_libraries() -> None:
    """Leave the screen to the run: libraries speak from warnings upwards, and on rank 0 only."""
    level = logging.WARNING if own_rank() == 0 else logging.ERROR
    for name in ("DeepSpeed", "transformers", "torch", "accelerate"):
        logging.getLogger(name).setLevel(level)


@contextmanager
def one_voice() -> Iterator[None]:
    """Report a user's error once; with or without one, end as `orderly_end` says.

    Wrong settings are seen by every rank alike, so rank 0 reports them. A lost peer is reported by whoever sees it.
    What only another rank knows is reported by it when rank 0 has stayed silent.
    """
    with orderly_end():
        try:
            yield
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
