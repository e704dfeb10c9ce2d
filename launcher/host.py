"""Starts a module as ranks of this host: ``python -m megakv.launcher.host RANKS PORT MODULE WORDS``.

By DeepSpeed's launcher of one host, without its runner, which would look for hosts first: that imports all libraries
once more, takes what a ``/job/hostfile`` names, and gives ranks the first devices, whichever were asked for.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Sequence


def devices(asked: str | None, ranks: int) -> Sequence[int | str]:
    """Numbers or names of the devices of so many ranks, of those that a variable such as CUDA_VISIBLE_DEVICES names.

    Where it names fewer, or none, the others have none: nobody sees what was not asked for.
    """
    if asked is None:
        return range(ranks)
    named = asked.split(",")[:ranks]
    return [*named, *[""] * (ranks - len(named))]


def main() -> None:
    """Entry of the process that starts the ranks, and ends when all have ended."""
    count, port, module, *words = sys.argv[1:]
    ranks = int(count)
    if "DS_ACCELERATOR" not in os.environ:
        import torch

        # Ranks that outnumber the GPUs run on the CPU. DeepSpeed looks once, when it is imported.
        if torch.cuda.device_count() < ranks:
            os.environ["DS_ACCELERATOR"] = "cpu"
    try:
        from deepspeed.accelerator import get_accelerator
        from deepspeed.launcher import launch
    except ValueError as error:
        # Of DS_ACCELERATOR, which it names.
        sys.exit(f"megakv: error: {error}")
    asked = os.environ.get(get_accelerator().visible_devices_envs()[0])
    world = json.dumps({"localhost": list(devices(asked, ranks))})
    options = ["--world_info", base64.urlsafe_b64encode(world.encode()).decode(), "--master_addr", "127.0.0.1"]
    options += ["--master_port", port, "--no_local_rank", "--log_level", "critical", "--module"]
    sys.argv = [sys.argv[0], *options, module, *words]
    launch.main()


if __name__ == "__main__":
    main()
