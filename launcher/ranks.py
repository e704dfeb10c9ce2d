"""Commands that need ranks start their own, through the deepspeed launcher, and leave no process behind."""

from __future__ import annotations

import argparse
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING

from megakv.base.errors import MegaKVError
from megakv.launcher.process import UNREAD, own_rank
from megakv.launcher.remote import encode
from megakv.tracking.files import check_outputs

# What measures is imported by the ranks, not by who asks for a command's arguments.
if TYPE_CHECKING:
    import torch

    from megakv.distributed.comm import Communicator

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
TIMEOUT_S = 600.0
OWN = ("command", "verb", "run", "ranks", "local_rank")
"""Of the arguments of a command, those that its ranks do not take."""
SAID = (1, 130, UNREAD)
"""Statuses of ranks that have said why they ended, or need not: `process.report_errors`."""
LOOK_S = 0.5
"""How often to look whether anybody still reads what ranks print."""
PASSED = ("PATH", "OMP_NUM_THREADS", "DS_ACCELERATOR", "TORCH_EXTENSIONS_DIR", "HF_HOME", "HF_HUB_OFFLINE") + (
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    *("WANDB_MODE", "WANDB_DIR", "WANDB_RUN_ID", "WANDB_SWEEP_ID", "WANDB_SWEEP_PARAM_PATH"),
)
"""Of the environment, what ranks on other hosts get too."""


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
    check_outputs({"--json": arguments.json}, make_folders=False)


def command_line(arguments: argparse.Namespace) -> list[str]:
    """A command's arguments for its ranks; those without a value are left out."""
    words: list[str] = []
    for name, value in vars(arguments).items():
        if name not in OWN and value is not None and value is not False:
            words.append(f"--{name.replace('_', '-')}")
            words += [] if value is True else map(str, value if isinstance(value, list | tuple) else [value])
    return words


def start_ranks(
    module: str,
    words: Sequence[str],
    *,
    ranks: int,
    threads: int | None = None,
    hostfile: str | None = None,
    stdin: int | IO[bytes] | None = subprocess.DEVNULL,
) -> None:
    """Run a module with these arguments on so many ranks, through the deepspeed launcher, until all have ended.

    However this process ends, so do the ranks. They are of this machine, or of the hosts of a hostfile, which must have
    as many slots. `threads` are those of every rank (default: OMP_NUM_THREADS, else this machine's cores over the ranks
    on a host); `stdin` is what the ranks of this machine read, as `subprocess.Popen` takes it.

    Raises
    ------
    ValueError
        If the hostfile cannot be read, has another number of slots, or pdsh is missing.
    SystemExit
        If a rank ended with an error that it has reported, or if nobody reads what is printed any more.
    MegaKVError
        If a rank was killed.
    """
    slots = {} if hostfile is None else read_hostfile(hostfile)
    if slots and sum(slots.values()) != ranks:
        raise ValueError(
            f"--hostfile {hostfile} has {sum(slots.values())} slots, but the mesh has {ranks} ranks: allowed: as many"
        )
    port = str(_free_port())
    with ExitStack() as stack:
        if hostfile is None:
            environment = _environment(ranks, threads)
            command = ["megakv.launcher.host", str(ranks), port, module, *words]
        else:
            environment = _environment(max(slots.values()), threads)
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="megakv-")))
            environment["DS_ENV_FILE"] = str(_environment_file(folder, environment))
            hosts = ["--hostfile", hostfile, "--launcher", "pdsh", "--launcher_args=-N", "--force_multi"]
            options = ["--master_port", port, "--no_local_rank", "--log_level", "critical", "--module"]
            runner = ["deepspeed.launcher.runner", *hosts, *options]
            command = [*runner, "megakv.launcher.remote", module, encode(words)]
        watched, kept = os.pipe()
        stack.callback(os.close, kept)
        guard = [sys.executable, "-S", str(Path(__file__).with_name("guard.py")), str(watched)]
        process = subprocess.Popen(
            [*guard, sys.executable, "-m", *command],
            stdin=stdin,
            env=environment,
            start_new_session=True,
            pass_fds=[watched],
        )
        os.close(watched)
        try:
            status = _wait_read(process)
        finally:
            # Asked to terminate, deepspeed's runner would end other processes by name.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if status in SAID:
        raise SystemExit(status)
    if status != 0:
        why = f"signal {256 - status}" if status > 128 else f"status {status}"
        raise MegaKVError(f"of {ranks} ranks, one ended with {why}: killed, perhaps for want of memory (see dmesg)")


def _wait_read(process: subprocess.Popen[bytes]) -> int:
    """The status with which a process ends; `UNREAD` once nobody reads this one's output, as after ``| head``."""
    output = select.poll()
    output.register(1, 0)
    while True:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(LOOK_S)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in output.poll(0)):
            return UNREAD


def read_hostfile(path: str) -> dict[str, int]:
    """Slots by host, in the order of a hostfile's lines ``NAME slots=RANKS``."""
    if shutil.which("pdsh") is None:
        raise ValueError(f"--hostfile {path} needs pdsh on this host (Debian, Ubuntu: apt install pdsh)")
    found: dict[str, int] = {}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--hostfile {path} cannot be read: {error}") from error
    for line in lines:
        if not line.strip() or line.strip().startswith("#"):
            continue
        host = re.match(r"\s*(\S+)\s+slots=([1-9]\d*)\s*(#.*)?$", line)
        if host is None or host[1] in found:
            raise ValueError(f"--hostfile {path}: the line {line!r}: allowed: NAME slots=RANKS, once for each host")
        found[host[1]] = int(host[2])
    if not found:
        raise ValueError(f"--hostfile {path} names no host: allowed: lines NAME slots=RANKS")
    return found


def _environment(ranks: int, threads: int | None) -> dict[str, str]:
    """Of so many ranks on a host."""
    # Console scripts of this environment, ninja among them, must be found where it is not activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    environment = {**os.environ, "PATH": path}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // ranks)))
    return environment


def _environment_file(folder: Path, environment: dict[str, str]) -> Path:
    """The file from which deepspeed takes the environment on other hosts: ours, then the user's, which prevails."""
    lines = []
    for name in (name for name in PASSED if name in environment):
        value = environment[name]
        # deepspeed puts it between double quotes and escapes nothing.
        if re.search(r'["$`\\\n%]', value):
            raise ValueError(
                f"{name}={value!r}: deepspeed cannot pass this value on to other hosts; change or unset it"
            )
        lines.append(f"{name}={value}")
    own = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    for path in (Path.home() / own, Path(own)):
        if path.is_file():
            lines += [line for line in path.read_text().splitlines() if line.strip()]
    file = folder / "environment"
    file.write_text("\n".join(lines))
    return file


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
    from megakv.distributed.failures import joining
    from megakv.distributed.ledger import Ledger
    from megakv.distributed.mesh import make_mesh, start_distributed

    torch.set_num_threads(arguments.threads)
    start_distributed(tp_only=False, timeout_s=TIMEOUT_S)
    world_size = torch.distributed.get_world_size()
    check_rank_arguments(arguments, world_size)
    with joining():
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
