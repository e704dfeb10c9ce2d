"""What its launcher tells a process of the world that it belongs to, before any process group stands."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from dataclasses import dataclass
from typing import Literal

SLURM_PORT = "29500"
TORCH_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """A process's place in the world."""

    kind: Literal["torch", "slurm", "mpi", "alone"]
    """Whose variables say it: torch.distributed's own (deepspeed, torchrun, accelerate), Slurm's, MPI's or nobody's."""
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    """Among the ranks of its host. MPI's is known once DeepSpeed has asked MPI, and then said as torch's."""


def read_launch() -> Launch:
    """This process's place as its launcher said it; a world of one where there was no launcher."""
    said = os.environ
    if "RANK" in said:
        return Launch("torch", int(said["RANK"]), int(said.get("WORLD_SIZE", "1")), int(said.get("LOCAL_RANK", "0")))
    if "OMPI_COMM_WORLD_RANK" in said:
        return Launch("mpi", int(said["OMPI_COMM_WORLD_RANK"]), int(said["OMPI_COMM_WORLD_SIZE"]))
    # Of steps alone: an allocation and a batch script have a rank and a number of tasks, too, but are one process.
    tasks = said.get("SLURM_STEP_NUM_TASKS", "1")
    # Where the numbers differ, mpirun has started its own daemons by srun, and the ranks are MPI's.
    if int(tasks) > 1 and said.get("PMI_SIZE", tasks) == tasks:
        return Launch("slurm", int(said["SLURM_PROCID"]), int(tasks), int(said.get("SLURM_LOCALID", "0")))
    if int(said.get("PMI_SIZE", "1")) > 1:
        return Launch("mpi", int(said["PMI_RANK"]), int(said["PMI_SIZE"]))
    return Launch("alone")


def check_torch_variables() -> None:
    """Refuse torch.distributed's variables where only some of them are set, or name no place to meet."""
    if missing := [name for name in TORCH_VARIABLES if name not in os.environ]:
        raise ValueError(
            f"RANK = {os.environ['RANK']}, as launchers set it, but not set: {', '.join(missing)}; start this process "
            f"by deepspeed, torchrun, accelerate or srun, set all of {', '.join(TORCH_VARIABLES)}, or none for one rank"
        )
    _check_address(os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"])


def slurm_address() -> str:
    """Where the tasks of a Slurm step meet, as ``host:port``."""
    host, port = os.environ.get("MASTER_ADDR") or _first_host(), os.environ.get("MASTER_PORT", SLURM_PORT)
    _check_address(host, port)
    return f"{host}:{port}"


def _check_address(host: str, port: str) -> None:
    """Refuse a place to meet that cannot be one: torch would name no setting, or try it again and again."""
    if not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"MASTER_PORT = {port!r}: allowed: the number of a port, up to 65535")
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise ValueError(
            f"MASTER_ADDR = {host!r} is no host that is known here ({error.strerror}): name that of rank 0"
        ) from error


def _first_host() -> str:
    nodes = os.environ.get("SLURM_STEP_NODELIST", "")
    if nodes and not any(mark in nodes for mark in "[,"):
        return nodes
    scontrol = shutil.which("scontrol")
    if scontrol is None or not nodes:
        raise ValueError("MASTER_ADDR is not set and scontrol is not there to ask for the first Slurm host; set it")
    shown = subprocess.run([scontrol, "show", "hostnames", nodes], capture_output=True, text=True, check=True)
    return shown.stdout.split()[0]
