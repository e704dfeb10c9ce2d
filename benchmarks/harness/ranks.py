"""A benchmark started by hand starts its own ranks through the deepspeed launcher, and leaves no process behind."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any, NoReturn

TIMED_OUT = 124


def is_rank() -> bool:
    """Whether a launcher started this process as one of several ranks."""
    return "RANK" in os.environ


def start_ranks(arguments: argparse.Namespace) -> int:
    """Run this very script, with this command line, on ``arguments.ranks`` processes.

    Parameters
    ----------
    arguments : Namespace
        As `harness.arguments.add_rank_arguments` defines them.

    Returns
    -------
    int
        The launcher's exit status; 124 if the run took longer than ``arguments.timeout`` and was ended.
    """
    script = Path(sys.argv[0]).resolve()
    start = ["--num_accelerators", str(arguments.ranks), "--master_port", str(_free_port()), "--no_local_rank"]
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--quiet", *start, str(script), *sys.argv[1:]]
    # An end by SIGTERM must run the clean-up below.
    signal.signal(signal.SIGTERM, _leave)
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=_environment(arguments), start_new_session=True)
    try:
        return process.wait(arguments.timeout)
    except subprocess.TimeoutExpired:
        print(
            f"{script.name}: not done after --timeout {arguments.timeout:g} s; ended. Raise it, or ask for less.",
            file=sys.stderr,
        )
        return TIMED_OUT
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        _kill_group(process)


def _environment(arguments: argparse.Namespace) -> dict[str, str]:
    import torch

    # Console scripts of this environment, ninja among them, must be found where it is not activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": str(arguments.threads)}
    # Ranks that outnumber the GPUs run on the CPU.
    if torch.cuda.device_count() < arguments.ranks:
        environment.setdefault("DS_ACCELERATOR", "cpu")
    return environment


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _leave(signum: int, frame: Any) -> NoReturn:
    sys.exit(128 + signum)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the launcher's whole process group: asked to terminate, deepspeed's runner ends others by name."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
