"""A benchmark started by hand starts its own ranks through the deepspeed launcher, and leaves no process behind."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

TIMED_OUT = 124


def is_rank() -> bool:
    """Whether a launcher started this process as one of several ranks."""
    return "RANK" in os.environ


def serve(run: Callable[[argparse.Namespace], None], arguments: argparse.Namespace) -> int:
    """What every rank does: the measurement, with one voice for all."""
    from megakv.launcher.process import quiet_libraries, report_errors

    quiet_libraries()
    with report_errors():
        run(arguments)
    return 0


def start_ranks(
    arguments: argparse.Namespace,
    options: Sequence[str] = (),
    *,
    ranks: int | None = None,
    timeout_s: float | None = None,
) -> int:
    """Run this very script, with this command line, on several processes."""
    script = Path(sys.argv[0]).resolve()
    start = ["--num_accelerators", str(ranks or arguments.ranks), "--master_port", str(free_port()), "--no_local_rank"]
    runner = [sys.executable, "-m", "deepspeed.launcher.runner", "--quiet", *start]
    command = [*runner, str(script), *sys.argv[1:], *options]
    # An end by SIGTERM must run the clean-up below.
    signal.signal(signal.SIGTERM, leave)
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, env=rank_environment(arguments), start_new_session=True
    )
    try:
        return process.wait(arguments.timeout if timeout_s is None else timeout_s)
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


def rank_environment(arguments: argparse.Namespace) -> dict[str, str]:
    """What ranks find in their environment: this process's, with their threads and accelerator."""
    import torch

    # Console scripts of this environment, ninja among them, must be found where it is not activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": str(arguments.threads)}
    # Ranks that outnumber the GPUs run on the CPU.
    if torch.cuda.device_count() < arguments.ranks:
        environment.setdefault("DS_ACCELERATOR", "cpu")
    return environment


def free_port() -> int:
    """A TCP port that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def leave(signum: int, frame: Any) -> NoReturn:
    """A signal handler that ends the process by way of its clean-up."""
    sys.exit(128 + signum)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the launcher's whole process group: asked to terminate, deepspeed's runner ends others by name."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
