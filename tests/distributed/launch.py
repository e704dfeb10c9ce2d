"""Starts real ranks, by a real launcher or by forking, bounded in time, and leaves no process behind."""

import atexit
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from tests.patience import holds_within, status_within
from tests.stacks import show, write_stacks

Launcher = Literal["forked", "deepspeed", "torchrun", "accelerate", "srun", "python"]
ROOT = Path(__file__).resolve().parents[2]
TAG = "MEGAKV_TEST_LAUNCH"
# How long processes may take to go after their launcher has ended before they count as left over, as of `Patience`.
GRACE_S = 5.0
PORT_ATTEMPTS = 3


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a launch came to.

    Attributes
    ----------
    returncode : int or None
        The launcher's exit status; None if the launch ran past its time limit and was killed.
    stdout, stderr : str
        Everything that the launcher and all ranks wrote.
    seconds : float
        From the start to the end of the launcher.
    leftovers : list of str
        Command lines of processes that were still alive `GRACE_S` after the launcher had ended by itself; by now they
        are killed. Empty after a time-out, where everything is killed anyway.
    codes : tuple of int or None
        Exit status per rank, of forked ranks only.
    """

    returncode: int | None
    stdout: str
    stderr: str
    seconds: float
    leftovers: list[str]
    codes: tuple[int | None, ...] = ()

    def check(self) -> "Result":
        """Asserts success with nothing left over, showing the end of the output otherwise; returns self."""
        assert self.returncode == 0 and not self.leftovers, (
            f"exit status {self.returncode} after {self.seconds:.1f} s, left over: {self.leftovers}\n"
            f"--- stdout ---\n{self.stdout[-4000:]}\n--- stderr ---\n{self.stderr[-8000:]}"
        )
        return self


def run_ranks(
    script: str | Path,
    *args: str | Path,
    ranks: int,
    timeout: float,
    env: dict[str, str] | None = None,
    launcher: Launcher = "forked",
) -> Result:
    """Runs ``script`` with ``args`` on ``ranks`` processes of this machine, on the CPU.

    Parameters
    ----------
    ranks : int
        Number of processes; 1 with the launcher ``python``, which starts the script by itself.
    timeout : float
        Seconds, as of `Patience`, after which the whole process tree is killed.
    env : dict, optional
        Variables set on top of the present ones and of the defaults: one thread per rank, and this checkout on
        PYTHONPATH.
    launcher : {"forked", "deepspeed", "torchrun", "accelerate", "srun", "python"}
        ``forked`` costs least: ranks are forked from a process that has imported everything.

    Returns
    -------
    Result
        Also where the launch failed or ran out of time: the caller judges.
    """
    if launcher == "forked":
        return run_forked(script, [list(args)] * ranks, timeout=timeout, env=env)
    return _on_a_free_port(
        lambda port: _run_once(
            _command(launcher, ranks, port, script, args),
            timeout,
            # Only Slurm's ranks look for it there.
            {"MASTER_PORT": str(port), **(env or {})} if launcher == "srun" else env or {},
        )
    )


def run_command(command: Sequence[str | Path], *, timeout: float, env: dict[str, str] | None = None) -> Result:
    """Runs a command that starts ranks itself; its environment, time limit and result are as of `run_ranks`."""
    return _run_once(list(map(str, command)), timeout, env or {})


def run_forked(
    script: str | Path,
    commands: Sequence[Sequence[str | Path]],
    *,
    timeout: float,
    env: dict[str, str] | None = None,
) -> Result:
    """Runs ``script`` on forked ranks, each with arguments of its own.

    Parameters
    ----------
    commands : sequence of sequence of str
        Per rank, its arguments.
    timeout, env
        As for `run_ranks`.
    """
    return _on_a_free_port(lambda port: _fork_once(script, commands, port, timeout, env or {}))


def _on_a_free_port(start: Callable[[int], Result]) -> Result:
    """A launch's result; again, where another process took the port between our look and the ranks' bind."""
    for _ in range(PORT_ATTEMPTS):
        result = start(free_port())
        if result.returncode in (0, None) or "EADDRINUSE" not in result.stderr:
            break
    return result


def _fork_once(
    script: str | Path, commands: Sequence[Sequence[str | Path]], port: int, timeout: float, env: dict[str, str]
) -> Result:
    with tempfile.TemporaryDirectory(prefix="megakv-launch-") as folder:
        paths = {name: str(Path(folder, name)) for name in ("stdout", "stderr")}
        for path in paths.values():
            Path(path).touch()
        answer = fork_server().ask(
            {
                "script": str(script),
                "commands": [list(map(str, command)) for command in commands],
                "env": {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), **env},
                "timeout": timeout,
                "answer": str(Path(folder, "answer")),
                **paths,
            }
        )
        texts = {name: Path(path).read_text(errors="replace") for name, path in paths.items()}
    codes: list[int | None] = answer["codes"]
    # As launchers do: the first failure is the launch's status.
    returncode = None if None in codes else next((code for code in codes if code), 0)
    if returncode is None:
        show(texts["stderr"])
    return Result(
        returncode=returncode, seconds=answer["seconds"], leftovers=answer["leftovers"], codes=tuple(codes), **texts
    )


class ForkServer:
    """The process that ranks are forked from."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("forkserver.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=_environment({}),
            text=True,
        )
        atexit.register(self.close)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """One request, answered when its ranks have ended. Threads may ask at once."""
        assert self._process.stdin is not None
        # A line at once: no other thread's comes in between.
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        path = Path(request["answer"])
        while not path.exists():
            assert self._process.poll() is None, f"the fork server ended with status {self._process.returncode}"
            time.sleep(0.01)
        answer: dict[str, Any] = json.loads(path.read_text())
        return answer

    def close(self) -> None:
        """End the server."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)


@functools.cache
def fork_server() -> ForkServer:
    """The one server of a test session, started when first needed."""
    return ForkServer()


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _command(launcher: str, ranks: int, port: int, script: str | Path, args: tuple[str | Path, ...]) -> list[str]:
    start: list[object]
    if launcher == "python":
        assert ranks == 1
        return [sys.executable, str(script), *map(str, args)]
    if launcher == "deepspeed":
        start = ["deepspeed.launcher.runner", "--num_accelerators", ranks, "--master_port", port, "--no_local_rank"]
    elif launcher == "accelerate":
        # Without --multi_gpu it would start one process on a machine without GPUs.
        options = ["--multi_gpu", "--num_processes", ranks, "--main_process_port", port]
        start = ["accelerate.commands.launch", *options]
    elif launcher == "srun":
        start = ["tests.distributed.srun", ranks]
    else:
        rendezvous: list[object] = ["--master-addr", "127.0.0.1", "--master-port", port]
        start = ["torch.distributed.run", "--nproc-per-node", ranks, *rendezvous]
    return [sys.executable, "-m", *map(str, start), str(script), *map(str, args)]


def _environment(more: dict[str, str]) -> dict[str, str]:
    # Console scripts of this environment, ninja among them, must be found where it is not activated.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    python_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    defaults = {"PATH": path, "PYTHONPATH": python_path, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    return {**os.environ, **defaults, **more}


def _run_once(command: list[str], timeout: float, env: dict[str, str]) -> Result:
    tag = uuid.uuid4().hex
    full_env = {**_environment(env), TAG: tag}
    # Files, not pipes: a rank that outlives its launcher would keep a pipe open, and a full pipe blocks its writer.
    with tempfile.TemporaryDirectory(prefix="megakv-launch-") as folder:
        paths = Path(folder, "stdout"), Path(folder, "stderr")
        start = time.monotonic()
        with open(paths[0], "wb") as out, open(paths[1], "wb") as err:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=full_env, start_new_session=True
            )
        leftovers: list[psutil.Process] = []
        returncode: int | None = None
        try:
            returncode = status_within(timeout, process)
            seconds = time.monotonic() - start
            leftovers = _alive_after_grace(tag)
        except subprocess.TimeoutExpired:
            seconds = time.monotonic() - start
            write_stacks(_tagged(tag))
        finally:
            names = [_describe(left) for left in leftovers]
            _kill_all(tag)
            process.wait()
        stdout, stderr = (path.read_text(errors="replace") for path in paths)
    if returncode is None:
        show(stderr)
    return Result(returncode=returncode, stdout=stdout, stderr=stderr, seconds=seconds, leftovers=names)


def _tagged(tag: str) -> list[psutil.Process]:
    """The live processes of one launch: the tag in their environment outlasts new sessions and lost parents."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(TAG) == tag:
                found.append(process)
        except psutil.Error:
            continue
    return found


def _alive_after_grace(tag: str) -> list[psutil.Process]:
    holds_within(GRACE_S, lambda: not _tagged(tag), every_s=0.1)
    return _tagged(tag)


def _kill_all(tag: str) -> None:
    """SIGKILL: deepspeed's runner may answer SIGTERM with a `pkill -f` by name. In rounds: children may be new."""
    while alive := _tagged(tag):
        for process in alive:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(alive, timeout=5)


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid}: {' '.join(process.cmdline())}"
    except psutil.Error:
        return f"{process.pid}: ended meanwhile"
