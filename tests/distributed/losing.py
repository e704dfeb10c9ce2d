"""Ranks that work until one of them is killed, or stopped, at some moment."""

import os
import re
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.distributed.launch import Launcher, Result, run_ranks
from tests.families import llama

SCRIPT = Path(__file__).parent / "ranks" / "working.py"


def save_config(folder: Path) -> Path:
    """The config of a model large enough that its work lasts."""
    config = llama(hidden_size=128, intermediate_size=256, num_hidden_layers=4, dtype="float32")
    config.save_pretrained(folder)
    return folder


@dataclass(frozen=True, kw_only=True)
class Loss:
    """How a launch ended that lost a rank.

    Parameters
    ----------
    result : Result
        Of the launch.
    victim, pid : int
        The rank that was lost.
    seconds : float
        From then until all had ended.
    """

    result: Result
    victim: int
    pid: int
    seconds: float

    @property
    def said(self) -> list[str]:
        """The lines that ranks gave out as MegaKV's."""
        return [line for line in self.result.stderr.splitlines() if line.startswith("megakv: ")]

    @property
    def speakers(self) -> list[int]:
        """Ranks that named the lost one, once for each time."""
        lost = rf"rank {self.victim} \(host \S+, pid {self.pid}\).* was lost"
        found = [re.match(rf"megakv: (?:error: rank (\d+): |rank (\d+) ends because ).*{lost}", s) for s in self.said]
        return [int(match[1] or match[2]) for match in found if match is not None]


def lose_rank(
    folder: Path,
    mesh: str,
    victim: int,
    work: str,
    *,
    delay_s: float,
    action: signal.Signals = signal.SIGKILL,
    launcher: Launcher = "forked",
    timeout_s: float = 600,
) -> Loss:
    """Start ranks on a folder with a model's config, and send one of them a signal after all have begun.

    Parameters
    ----------
    delay_s : float
        From then on.
    timeout_s : float
        ``megakv.timeout_s``: for peers that are alive and silent.
    """
    cp, tp = (int(part) for part in mesh.split("x"))
    files = [folder / f"begun-{rank}" for rank in range(cp * tp)]
    lost: list[float] = []
    over = threading.Event()

    def watch() -> None:
        while not all(path.exists() for path in files):
            if over.wait(0.02):
                return
        over.wait(delay_s)
        pids = [int(path.read_text()) for path in files]
        lost.append(time.monotonic())
        os.kill(pids[victim], action)
        if action == signal.SIGSTOP:
            # It receives the launcher's SIGTERM once the ranks that it kept waiting have ended.
            while not over.wait(0.1) and any(map(runs, pids[:victim] + pids[victim + 1 :])):
                pass
            os.kill(pids[victim], signal.SIGCONT)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        result = run_ranks(SCRIPT, folder, mesh, work, str(timeout_s), ranks=cp * tp, timeout=180, launcher=launcher)
        ended = time.monotonic()
    finally:
        over.set()
        watcher.join()
    assert lost, f"not all ranks began: {result}"
    return Loss(result=result, victim=victim, pid=int(files[victim].read_text()), seconds=ended - lost[0])


def runs(pid: int) -> bool:
    """Whether a process is there."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
