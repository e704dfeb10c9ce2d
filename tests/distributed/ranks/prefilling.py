"""Started on every rank: prefills for ever, until one rank is killed, or falls silent, in the middle of it.

Usage: prefilling.py FOLDER CPxTP VICTIM kill|stop TIMEOUT_S [METHOD]. FOLDER holds the model's config. Every rank
leaves its pid in ``FOLDER/prefilling-RANK`` once it has begun; the victim waits for all, then leaves the time and its
pid in ``FOLDER/lost``.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import psutil
import torch

import megakv
from megakv.launcher.voice import one_voice, quiet_libraries

TOKENS = 2048


def wake_when_gone(victim: int, other: int) -> None:
    """Let a stopped process receive the launcher's SIGTERM, once the rank that it kept waiting has ended."""
    if os.fork() == 0:
        while psutil.pid_exists(other) and psutil.Process(other).status() != psutil.STATUS_ZOMBIE:
            time.sleep(0.1)
        os.kill(victim, signal.SIGCONT)
        os._exit(0)


def leave_when_all_prefill(folder: Path, ranks: int, action: str) -> None:
    """End or stop this process at some moment of a prefill."""
    files = [folder / f"prefilling-{rank}" for rank in range(ranks)]
    while not all(path.exists() for path in files):
        time.sleep(0.02)
    time.sleep(random.random())
    if action == "stop":
        others = [int(path.read_text()) for path in files]
        wake_when_gone(os.getpid(), next(pid for pid in others if pid != os.getpid()))
    (folder / "lost").write_text(f"{time.time()} {os.getpid()}")
    os.kill(os.getpid(), signal.SIGKILL if action == "kill" else signal.SIGSTOP)


def main() -> None:
    """Entry of every rank."""
    folder, mesh, victim, action = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), sys.argv[4]
    cp, tp = (int(part) for part in mesh.split("x"))
    config = {
        "dtype": "fp32",
        "tensor_parallel": {"tp_size": tp},
        "megakv": {
            "context_parallel": {"size": cp, "prefill": (sys.argv[6:] or ["auto"])[0]},
            "load": "random",
            "timeout_s": float(sys.argv[5]),
        },
    }
    torch.set_num_threads(1)
    quiet_libraries()
    with one_voice():
        engine = megakv.init_inference(str(folder), config)
        rank = engine.mesh.rank
        ids = torch.randint(3, 100, (1, TOKENS), generator=torch.Generator().manual_seed(0))
        engine(ids, logits_to_keep=1)
        # Whole or not at all: the victim reads it.
        partial = folder / f"partial-{rank}"
        partial.write_text(str(os.getpid()))
        partial.rename(folder / f"prefilling-{rank}")
        if rank == victim:
            threading.Thread(target=leave_when_all_prefill, args=(folder, cp * tp, action), daemon=True).start()
        while True:
            engine(ids, logits_to_keep=1)


if __name__ == "__main__":
    main()
