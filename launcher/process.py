"""The life of a rank's process: who it is, what it says, and how it ends, so that nobody is left hanging."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from megakv.errors import MegaKVError, PeerLostError

DEFAULT_PORT = "29500"
PATIENCE_SECONDS = 10.0
"""How long another rank leaves the word to rank 0, whose exit makes the launcher end all ranks."""


# Who it is, before any process group stands: deepspeed, torchrun and Slurm say it differently.


def own_rank() -> int:
    """This process's rank as its launcher said it."""
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        if name in os.environ:
            return int(os.environ[name])
    return 0


def adopt_slurm() -> None:
    """Translate Slurm's task variables into those that torch.distributed reads, where nothing else set them."""
    if "RANK" in os.environ or "SLURM_PROCID" not in os.environ or int(os.environ.get("SLURM_NTASKS", "1")) < 2:
        return
    os.environ["RANK"] = os.environ["SLURM_PROCID"]
    os.environ["WORLD_SIZE"] = os.environ["SLURM_NTASKS"]
    os.environ["LOCAL_RANK"] = os.environ.get("SLURM_LOCALID", "0")
    os.environ.setdefault("MASTER_PORT", DEFAULT_PORT)
    if "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"] = _first_slurm_host()


def _first_slurm_host() -> str:
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    if nodes and not any(mark in nodes for mark in "[,"):
        return nodes
    scontrol = shutil.which("scontrol")
    if scontrol is None or not nodes:
        raise ValueError("MASTER_ADDR is not set and scontrol is not there to ask for the first Slurm host; set it")
    shown = subprocess.run([scontrol, "show", "hostnames", nodes], capture_output=True, text=True, check=True)
    return shown.stdout.split()[0]


def adopt_single_process() -> None:
    """Let a script that no launcher started be a world of one rank."""
    if "RANK" not in os.environ and "OMPI_COMM_WORLD_RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")


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


# How it ends: in order when its work is done, at once when something went wrong.


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
    from megakv.distributed.mesh import stop_distributed  # by now there, unless nothing was begun

    stop_distributed()


@contextmanager
def report_errors() -> Iterator[None]:
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
