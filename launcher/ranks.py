"""Commands that need ranks start their own, through the deepspeed launcher, and leave no process behind."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megakv.errors import MegaKVError
from megakv.launcher.process import own_rank

# What measures is imported by the ranks, not by who asks for a command's arguments.
if TYPE_CHECKING:
    import torch

    from megakv.distributed.comm import Communicator

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
TIMEOUT_S = 600.0
OWN = ("command", "run", "ranks", "local_rank")
"""Of the arguments of a command, those that its ranks do not take."""


def add_rank_arguments(
    parser: argparse.ArgumentParser, *, seconds: float, seconds_help: str, ranks: bool = False
) -> None:
    """What every measuring command takes; with `ranks`, how many processes it starts."""
    if ranks:
        parser.add_argument("--ranks", type=int, default=2, help="processes to start on this machine (default 2)")
    parser.add_argument("--threads", type=int, default=1, help="threads of every rank (default 1)")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="fp32", help="of weights and cache (default fp32)")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks to a context-parallel one (default 1)")
    parser.add_argument("--seconds", type=float, default=seconds, help=seconds_help)
    parser.add_argument("--json", required=True, metavar="FILE", help="where the result goes")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)


def check_rank_arguments(arguments: argparse.Namespace, ranks: int) -> None:
    """Refuse impossible ones before anything is measured."""
    if arguments.threads < 1:
        raise ValueError(f"--threads {arguments.threads}: allowed: 1 or more")
    if not 1 <= arguments.seconds <= 36000:
        raise ValueError(f"--seconds {arguments.seconds:g}: allowed: 1 to 36000")
    if arguments.tp < 1 or ranks % arguments.tp or ranks // arguments.tp < 2:
        raise ValueError(
            f"--ranks {ranks} with --tp {arguments.tp}: allowed: a multiple of --tp, twice it or more, because what is "
            "measured is how context-parallel ranks work together"
        )
    check_writable("--json", arguments.json)


def check_writable(option: str, path: str) -> None:
    """Refuse a file that could not be written in the end."""
    folder = Path(path).resolve().parent
    if Path(path).is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ValueError(f"{option} {path}: cannot be written: the folder must exist and be writable")


def command_line(arguments: argparse.Namespace) -> list[str]:
    """A command's arguments for its ranks; those without a value are left out."""
    words: list[str] = []
    for name, value in vars(arguments).items():
        if name not in OWN and value is not None and value is not False:
            words.append(f"--{name.replace('_', '-')}")
            words += [] if value is True else map(str, value if isinstance(value, list | tuple) else [value])
    return words


def start_ranks(module: str, ranks: int, arguments: argparse.Namespace) -> None:
    """Run a module on so many processes of this machine, with the arguments of the command that it belongs to."""
    options = ["--num_accelerators", str(ranks), "--master_port", str(_free_port()), "--no_local_rank", "--quiet"]
    words = [*options, "--module", module, *command_line(arguments)]
    process = subprocess.Popen(
        [sys.executable, "-m", "deepspeed.launcher.runner", *words],
        stdin=subprocess.DEVNULL,
        env=_environment(ranks, arguments.threads),
        start_new_session=True,
    )
    try:
        status = process.wait()
    finally:
        # Asked to terminate, deepspeed's runner would end other processes by name.
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            status = process.wait()
    if status != 0:
        raise MegaKVError(f"the {ranks} ranks ended with status {status}")


def _environment(ranks: int, threads: int) -> dict[str, str]:
    import torch

    # Console scripts of this environment, ninja among them, must be found where it is not activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": str(threads)}
    # Ranks that outnumber the GPUs run on the CPU.
    if torch.cuda.device_count() < ranks:
        environment.setdefault("DS_ACCELERATOR", "cpu")
    return environment


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def dtype_of(arguments: argparse.Namespace) -> torch.dtype:
    """That of --dtype."""
    import torch

    return getattr(torch, DTYPES[arguments.dtype])


def join_ranks(arguments: argparse.Namespace) -> Communicator:
    """This rank's communicator, on a context-parallel x tensor-parallel mesh over all ranks."""
    import torch

    from megakv.distributed.comm import Communicator
    from megakv.distributed.ledger import Ledger
    from megakv.distributed.mesh import make_mesh, start_distributed

    torch.set_num_threads(arguments.threads)
    start_distributed(tp_only=False, timeout_s=TIMEOUT_S)
    world_size = torch.distributed.get_world_size()
    check_rank_arguments(arguments, world_size)
    mesh = make_mesh(cp_size=world_size // arguments.tp, tp_size=arguments.tp, timeout_s=TIMEOUT_S)
    return Communicator(mesh, Ledger())


@contextmanager
def progress(name: str) -> Iterator[Callable[[int], None]]:
    """A bar over the steps of a measurement, on rank 0; it is told how many there are after each of them."""
    from tqdm import tqdm

    with tqdm(desc=name, unit="step", disable=own_rank() != 0, mininterval=0.5) as bar:

        def step(total: int) -> None:
            bar.total = total
            bar.update(1)

        yield step
