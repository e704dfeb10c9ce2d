"""Who this process is, before any process group stands: deepspeed, torchrun and Slurm say it differently."""

from __future__ import annotations

import os
import shutil
import subprocess

DEFAULT_PORT = "29500"


def adopt_slurm() -> None:
    """Translate Slurm's task variables into those that torch.distributed reads, where nothing else set them.

    Raises
    ------
    ValueError
        If the first host of the allocation cannot be found and MASTER_ADDR is not set.
    """
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


def own_rank() -> int:
    """This process's rank as its launcher said it."""
    for name in ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"):
        if name in os.environ:
            return int(os.environ[name])
    return 0
