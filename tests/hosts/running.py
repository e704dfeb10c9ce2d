"""A command under way on the hosts, bounded in time, with an account of what it left behind."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.distributed.launch import GRACE_S, Result
from tests.patience import holds_within, status_within
from tests.stacks import show, write_stacks


class Running:
    """A started command.

    Parameters
    ----------
    command : list of str
    env : dict
    processes : callable
        Lists what runs on the hosts; it must be this command's alone.
    folder : Path, optional
        Where to keep its output; without one it is not kept.
    """

    def __init__(
        self,
        command: list[str],
        env: dict[str, str],
        processes: Callable[[], list[psutil.Process]],
        folder: Path | None,
    ):
        self._processes = processes
        self._folder = folder
        self._start = time.monotonic()
        if folder is None:
            self._process = subprocess.Popen(command, env=env)
            return
        # Files, not pipes: a process that is left over would keep a pipe open, and a full pipe blocks its writer.
        with open(folder / "stdout", "wb") as out, open(folder / "stderr", "wb") as err:
            self._process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )

    @property
    def stdout(self) -> str:
        """What it has written so far."""
        return self._text("stdout")

    @property
    def stderr(self) -> str:
        """What it has written so far."""
        return self._text("stderr")

    def _text(self, name: str) -> str:
        return "" if self._folder is None else (self._folder / name).read_text(errors="replace")

    def ended(self) -> bool:
        """Whether the command itself has ended."""
        return self._process.poll() is not None

    def wait(self, timeout: float | None = None) -> Result:
        """Wait for its end; kill everything on the hosts after `timeout` seconds, as of `Patience`, or an exception."""
        leftovers: list[str] = []
        returncode: int | None = None
        try:
            returncode = self._process.wait() if timeout is None else status_within(timeout, self._process)
            seconds = time.monotonic() - self._start
            leftovers = self._alive_after_grace()
        except subprocess.TimeoutExpired:
            seconds = time.monotonic() - self._start
            write_stacks(self._processes())
        finally:
            self.kill()
        if returncode is None:
            show(self.stderr)
        return Result(
            returncode=returncode, stdout=self.stdout, stderr=self.stderr, seconds=seconds, leftovers=leftovers
        )

    def _alive_after_grace(self) -> list[str]:
        holds_within(GRACE_S, lambda: not self._processes(), every_s=0.1)
        return [_describe(process) for process in self._processes()]

    def kill(self) -> None:
        """SIGKILL to everything on the hosts. In rounds: children may be new."""
        # It entered the first host in a child of its own, which is among the processes.
        self._process.kill()
        while alive := self._processes():
            for process in alive:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(alive, timeout=5)
        self._process.wait()


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid}: {' '.join(process.cmdline())}"
    except psutil.Error:
        return f"{process.pid}: ended meanwhile"
