"""A set of Linux namespaces that lives as long as this object: the substance of a host."""

from __future__ import annotations

import os
import select
import subprocess
from collections.abc import Sequence
from typing import Self

import psutil

from tests.hosts.tools import find

START_S = 20.0
END_S = 5.0
# `read` ends with the standard input, so nothing outlives the process that made the namespace, however that ends: when
# the first process of a pid namespace ends, the kernel kills all others, and the network devices go with the last.
HOLD = "echo ready; read -r _"
KINDS = ("net", "uts", "ipc", "mount", "pid")


class Namespace:
    """Network, host name, mounts and processes of their own, under this machine's file system.

    Its first process runs a bash script, says that it is ready, and holds the namespaces until they are closed.

    Parameters
    ----------
    setup : str
        Bash, run inside with ``set -e``.
    *args : str
        ``$1``, ``$2`` ... of the script.

    Raises
    ------
    RuntimeError
        If the namespaces cannot be made or the script fails: what it said.
    """

    def __init__(self, setup: str, *args: str):
        flags = [f"--{kind}" for kind in KINDS]
        script = f"set -e\n{setup}\n{HOLD}"
        self._holder = subprocess.Popen(
            [find("unshare"), *flags, "--fork", "--kill-child", "--mount-proc", "bash", "-c", script, "bash", *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # A terminal's Ctrl-C is for the command that runs inside, which may need its host to clean up.
            start_new_session=True,
        )
        try:
            self._await_ready()
            (first,) = psutil.Process(self._holder.pid).children()
            self.pid = first.pid
            self._kind = _pid_namespace(self.pid)
            self._own = {process.pid for process in self._inside()}
        except BaseException:
            self.close()
            raise

    def _await_ready(self) -> None:
        assert self._holder.stdout is not None
        said = b""
        while not said.endswith(b"ready\n"):
            readable, _, _ = select.select([self._holder.stdout], [], [], START_S)
            chunk = os.read(self._holder.stdout.fileno(), 4096) if readable else b""
            if not chunk:
                raise RuntimeError(f"a namespace could not be set up: {said.decode(errors='replace').strip()}")
            said += chunk

    def enter(self, *command: str, kinds: Sequence[str] = KINDS) -> list[str]:
        """The command line that runs a command inside, or in some kinds of the namespaces only."""
        return [find("nsenter"), "--target", str(self.pid), *(f"--{kind}" for kind in kinds), "--", *command]

    def run(self, *command: str) -> str:
        """Run a short command inside and return its output.

        Raises
        ------
        RuntimeError
            If it fails: what it said.
        """
        done = subprocess.run(self.enter(*command), stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def processes(self) -> list[psutil.Process]:
        """What runs inside, without the processes that the set-up started."""
        return [process for process in self._inside() if process.pid not in self._own]

    def _inside(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if _pid_namespace(process.pid) == self._kind and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return found

    def close(self) -> None:
        """End everything inside and wait until it is gone. May be called again."""
        assert self._holder.stdin is not None and self._holder.stdout is not None
        self._holder.stdin.close()
        try:
            # It waits for the first process inside, whose end the kernel delays until all others are gone.
            self._holder.wait(END_S)
        except subprocess.TimeoutExpired:
            self._holder.kill()
            self._holder.wait()
        self._holder.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _pid_namespace(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/pid")
