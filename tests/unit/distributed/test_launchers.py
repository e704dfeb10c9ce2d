"""Who a process is, by the variables of its launcher."""

import os

import pytest

from megakv.distributed.launchers import Launch, check_torch_variables, read_launch, slurm_address

TASK = {"SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "localhost"}
TORCH = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
MPI = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8"}


@pytest.mark.parametrize(
    ("variables", "launch"),
    [
        ({}, Launch("alone")),
        (TORCH, Launch("torch", 1, 2, 0)),
        (TASK, Launch("slurm", 3, 4, 1)),
        pytest.param(TASK | TORCH, Launch("torch", 1, 2, 0), id="torchrun within a step"),
        pytest.param(TASK | MPI, Launch("mpi", 5, 8), id="mpirun's daemons, started as a step"),
        pytest.param(TASK | {"PMI_RANK": "6", "PMI_SIZE": "8"}, Launch("mpi", 6, 8), id="the same by MPICH"),
        pytest.param(TASK | {"PMI_RANK": "3", "PMI_SIZE": "4"}, Launch("slurm", 3, 4, 1), id="srun --mpi=pmi2"),
        pytest.param({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, Launch("alone"), id="a batch script"),
        pytest.param({"MASTER_ADDR": "n1", "MASTER_PORT": "1"}, Launch("alone"), id="accelerate, one process"),
    ],
)
def test_place(variables: dict[str, str], launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", variables)
    assert read_launch() == launch


def test_tasks_meet_on_the_first_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", TASK)
    assert slurm_address() == "localhost:29500"
    monkeypatch.setattr(os, "environ", TASK | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "7"})
    assert slurm_address() == "127.0.0.1:7"
    monkeypatch.setattr(os, "environ", TASK | {"SLURM_STEP_NODELIST": "n[1-2]"})
    with pytest.raises(ValueError, match="MASTER_ADDR is not set and scontrol is not there"):
        slurm_address()


def test_half_of_torch_variables_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", TORCH)
    with pytest.raises(ValueError, match="RANK = 1.* not set: MASTER_ADDR, MASTER_PORT; start this process by"):
        check_torch_variables()
