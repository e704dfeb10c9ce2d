"""A stand-in for Slurm's srun on one host: tasks that know of each other only by Slurm's variables.

Usage: python -m tests.distributed.srun TASKS SCRIPT ARGUMENTS...
"""

import os
import subprocess
import sys

tasks = int(sys.argv[1])
for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR"):
    os.environ.pop(name, None)
shared = {
    **os.environ,
    "SLURM_NTASKS": str(tasks),
    "SLURM_STEP_NUM_TASKS": str(tasks),
    "SLURM_STEP_NODELIST": "localhost",
}
processes = [
    subprocess.Popen(
        [sys.executable, *sys.argv[2:]], env={**shared, "SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)}
    )
    for task in range(tasks)
]
sys.exit(max(abs(process.wait()) for process in processes))
