"""Runs a benchmark as it is run by hand, but its ranks are forked: DeepSpeed's launcher takes longer than a tiny run.

Usage: forked.py SCRIPT ARGUMENT ..., for the fork server. tests/unit/benchmarks/test_prefill.py has the launcher.
With MEGAKV_TEST_EVEN_COSTS in the environment offloaded tokens are divided by `even_costs`.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from tests.distributed.forkserver import fork_ranks, wait_for_ranks
from tests.even_costs import even_costs
from tests.patience import Patience

SCRIPT, *WORDS = sys.argv[1:]


def start_forked(arguments: argparse.Namespace, options: Sequence[str], *, ranks: int, timeout_s: float) -> int:
    """As `harness.launch.start_ranks`."""
    from harness.launch import free_port, rank_environment

    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    request = {
        "script": SCRIPT,
        "commands": [[*WORDS, *options]] * ranks,
        "env": {**rank_environment(arguments), **address},
        "stdout": "/proc/self/fd/1",
        "stderr": "/proc/self/fd/2",
    }
    # What is still to be written would be written by every rank.
    sys.stdout.flush()
    sys.stderr.flush()
    codes = wait_for_ranks(fork_ranks(request), Patience(timeout_s))
    # None stands for a rank that was not done in time.
    return next((1 if code is None else code for code in codes if code != 0), 0)


def main() -> None:
    """What `SCRIPT` does, in a process that is no rank itself."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    sys.argv = [SCRIPT, *WORDS]
    sys.path[0] = str(Path(SCRIPT).parent)
    import harness.launch

    harness.launch.start_ranks = start_forked
    with even_costs() if "MEGAKV_TEST_EVEN_COSTS" in os.environ else nullcontext():
        runpy.run_path(SCRIPT, run_name="__main__")


if __name__ == "__main__":
    main()
