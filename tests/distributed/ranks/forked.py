"""Runs a script on forked ranks, many times in one process: what a launch costs most, the imports, is paid once.

Usage: forked.py SCRIPT CASES.json OUT.json. A case is a list of the script's arguments, one list per rank. Ranks get
what a launcher tells them; when one fails the others are sent SIGTERM, as launchers do.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import psutil

import megakv.launcher.run  # noqa: F401  what every script needs

LIMIT_S = 120.0


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def be_rank(script: str, argv: list[str], environment: dict[str, str], output: int) -> NoReturn:
    """What a child does: run the script as a rank, and never return."""
    code = 1
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.update(environment)
        sys.argv = [script, *argv]
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


def run_case(script: str, commands: list[list[str]]) -> dict[str, Any]:
    """One start of all ranks: their exit statuses, what they wrote, and how long it took in seconds."""
    port, children = str(free_port()), {}
    start = time.monotonic()
    with tempfile.TemporaryFile() as output:
        for rank, argv in enumerate(commands):
            environment = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(len(commands)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            pid = os.fork()
            if pid == 0:
                be_rank(script, argv, environment, output.fileno())
            children[pid] = rank
        codes: list[int | None] = [None] * len(commands)
        while None in codes and time.monotonic() - start < LIMIT_S:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                time.sleep(0.02)
                continue
            code = os.waitstatus_to_exitcode(status)
            if code and not any(codes):
                for other, rank in children.items():
                    if codes[rank] is None and other != pid:
                        os.kill(other, signal.SIGTERM)
            codes[children[pid]] = code
        left = psutil.Process().children(recursive=True)
        for process in left:
            process.kill()
        psutil.wait_procs(left)
        output.seek(0)
        text = output.read().decode(errors="replace")
    return {"codes": codes, "output": text, "seconds": time.monotonic() - start, "left": len(left)}


if __name__ == "__main__":
    script, cases = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    Path(sys.argv[3]).write_text(json.dumps({name: run_case(script, commands) for name, commands in cases.items()}))
