"""Starts `megakv serve` as a user does, and says where it listens."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import openai
import psutil

from tests.distributed.launch import GRACE_S, ROOT
from tests.patience import Patience, alive_after, status_within

START_S = 180.0
END_S = 120.0
NAME = "tiny"


class Server:
    """The command in a ``with``; all its processes are gone afterwards."""

    def __init__(self, folder: Path, model: Path, *words: str | Path | int, env: dict[str, str] | None = None):
        folder.mkdir(exist_ok=True)
        self._paths = folder / "stdout", folder / "stderr"
        command = [sys.executable, "-m", "megakv", "serve", str(model), "--name", NAME, "--port", "0"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", **(env or {})}
        with open(self._paths[0], "wb") as out, open(self._paths[1], "wb") as err:
            self.process = subprocess.Popen(
                [*command, *map(str, words)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                cwd=ROOT,
                env=environment,
                start_new_session=True,
            )
        self._family: list[psutil.Process] = []
        self.url = ""

    def __enter__(self) -> Self:
        patience = Patience(START_S)
        while (found := re.search(r"at (http://\S+) \(pid (\d+)\)", self.stdout)) is None:
            assert self.process.poll() is None and not patience.over, self.stdout + self.stderr
            time.sleep(0.1)
        self.url, self.first_rank = found[1], psutil.Process(int(found[2]))
        self._family = psutil.Process(self.process.pid).children(recursive=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(END_S)
        alive = alive_after(GRACE_S, self._family)
        for left in alive:
            left.kill()
        assert not alive or error is not None, alive

    @property
    def stdout(self) -> str:
        return self._paths[0].read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return self._paths[1].read_text(errors="replace")

    @property
    def ranks(self) -> list[psutil.Process]:
        """The processes of ranks, in order."""
        own = [each for each in self._family if "--local_rank" not in each.cmdline()]
        found = [each for each in own if "megakv.launcher.serve" in each.cmdline() and _has_rank(each)]
        return sorted(found, key=lambda each: int(each.environ()["RANK"]))

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=END_S)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=END_S)

    def end(self, *, signum: int = signal.SIGTERM) -> int:
        """Ask it to end, and wait until it has; its status."""
        self.process.send_signal(signum)
        return status_within(END_S, self.process)


def _has_rank(process: psutil.Process) -> bool:
    try:
        return "RANK" in process.environ()
    except psutil.Error:
        return False
