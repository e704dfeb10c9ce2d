"""Starts ranks by forking itself: what a launch costs most, the imports, is paid once for all tests.

It reads one request per line from standard input, and writes what each came to in a file, both as JSON. A request has a
`script`, its arguments per rank in `commands`, variables in `env`, a `timeout` in seconds and the paths `stdout`,
`stderr` and `answer`. Ranks are told what DeepSpeed's launcher tells them; when one fails the others are sent SIGTERM,
as launchers do. Several requests may be under way: a process of its own sees to each.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import deepspeed.ops
import matplotlib.backends.backend_agg  # noqa: F401
import matplotlib.figure  # noqa: F401
import psutil
import setuptools  # noqa: F401  DeepSpeed looks for compilers at the first start of a group
import torch.utils.cpp_extension  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401

# What most scripts need: every rank would import it anew, also what megakv imports at first use alone.
import megakv.engine.build  # noqa: F401
import megakv.engine.session_files  # noqa: F401
import megakv.injection.families  # noqa: F401
import megakv.launcher.run  # noqa: F401
import tests.families  # noqa: F401
from tests.patience import Patience, holds_within
from tests.stacks import write_stacks

# How long the others have to end once a rank has failed, as with DeepSpeed and torchrun.
PATIENCE_S = 30.0
# How long processes may take to go after the last rank has ended before they count as left over.
GRACE_S = 5.0
PARENT = os.getppid()
PR_SET_CHILD_SUBREAPER = 36


def be_rank(request: dict[str, Any], rank: int) -> NoReturn:
    """What a child does: run the script, and never return."""
    code = 1
    try:
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        ranks = str(len(request["commands"]))
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=ranks, LOCAL_SIZE=ranks)
        os.environ.update(request["env"])
        script = request["script"]
        sys.argv = [script, *request["commands"][rank]]
        sys.path[0] = str(Path(script).parent)
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def adopt_orphans() -> None:
    """Become the parent of what a rank leaves behind, so that it is found."""
    assert ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def offspring() -> list[psutil.Process]:
    """Live processes that descend from this one."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            continue
    return found


def describe(process: psutil.Process) -> str:
    """A process for a message."""
    try:
        return f"{process.pid}: {' '.join(process.cmdline())}"
    except psutil.Error:
        return f"{process.pid}: ended meanwhile"


def kill(processes: list[psutil.Process]) -> None:
    """SIGKILL, and wait. psutil waits for its own children, whose zombies it takes away."""
    for process in processes:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(processes, timeout=5)


def signal_rank(pid: int, number: int) -> None:
    """Send a signal to a rank that may have ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def wait_for_ranks(pids: list[int], patience: Patience) -> list[int | None]:
    """Exit statuses of all ranks, None for those that had to be killed when time was over."""
    codes: list[int | None] = [None] * len(pids)
    failed: float | None = None
    parent = os.getppid()
    while None in codes:
        if patience.over or os.getppid() != parent:
            return codes
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in pids:
            code = codes[pids.index(pid)] = os.waitstatus_to_exitcode(status)
            if code and failed is None:
                failed = time.monotonic()
                for other, present in zip(pids, codes, strict=True):
                    if present is None:
                        signal_rank(other, signal.SIGTERM)
        elif failed is not None and time.monotonic() > failed + PATIENCE_S:
            for other, present in zip(pids, codes, strict=True):
                if present is None:
                    signal_rank(other, signal.SIGKILL)
        if pid == 0:
            time.sleep(0.02)
    return codes


def fork_ranks(request: dict[str, Any]) -> list[int]:
    """Start a request's ranks: their process identifiers."""
    pids = []
    for rank in range(len(request["commands"])):
        pid = os.fork()
        if pid == 0:
            be_rank(request, rank)
        pids.append(pid)
    return pids


def serve(request: dict[str, Any]) -> dict[str, Any]:
    """Run one request: exit statuses, seconds, and what was left over and is killed by now."""
    start = time.monotonic()
    pids = fork_ranks(request)
    codes = wait_for_ranks(pids, Patience(request["timeout"]))
    seconds = time.monotonic() - start
    names = []
    if None in codes:
        write_stacks(offspring())
    elif not holds_within(GRACE_S, lambda: not offspring(), every_s=0.1):
        names = [describe(process) for process in offspring()]
    while left := offspring():
        kill(left)
    return {"codes": codes, "seconds": seconds, "leftovers": names}


def keep(request: dict[str, Any]) -> NoReturn:
    """What the process of one request does."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    adopt_orphans()
    answer = Path(request["answer"])
    partial = answer.with_suffix(".partial")
    partial.write_text(json.dumps(serve(request)))
    partial.rename(answer)
    os._exit(0)


def main() -> None:
    """Serve until standard input ends."""
    # Nobody waits for the processes of requests.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    # For this DeepSpeed runs the compiler; every rank would.
    assert deepspeed.ops.__compatible_ops__
    gc.freeze()
    for line in sys.stdin:
        if os.fork() == 0:
            keep(json.loads(line))
        if os.getppid() != PARENT:
            return


if __name__ == "__main__":
    main()
