"""A benchmark started by hand starts its own ranks through the deepspeed launcher, and leaves no process behind."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megakv.base.errors import MegaKVError
from megakv.launcher.process import quiet_libraries, report_errors

from .links import FREE, TIMED_OUT, start_on_hosts, unavailable
from .publish import describe_machine, publish
from .world import World, join_world

Rows = list[dict[str, Any]]
Summary = dict[str, Any]
Found = tuple[Rows, Summary, list[Any]]
"""Outcome of a benchmark: rows, their summary, and charts."""
Measure = Callable[[argparse.Namespace, World], Rows]
Report = Callable[[argparse.Namespace, Rows, dict[str, str]], Found]


@dataclass(frozen=True)
class Launch:
    """Ranks to start: over this machine's loopback, or on hosts of their own whose links have a rate."""

    ranks: int
    options: Sequence[str] = ()
    text: str = ""  # Printed before
    name: str = ""  # In the list of what could not be measured
    rate: str = FREE
    hosts: int | None = None  # As many as ranks if None
    noise: bool = False  # Beside a competing flow of half the rate

    def start(self, arguments: argparse.Namespace, options: Sequence[str], timeout_s: float) -> int:
        """Run this very script, with this command line and further options; the exit status, or `TIMED_OUT`."""
        if self.rate == FREE:
            return start_ranks(arguments, options, ranks=self.ranks, timeout_s=timeout_s)
        shape = {"ranks": self.ranks, "hosts": self.hosts or self.ranks, "rate": self.rate, "noise": self.noise}
        return start_on_hosts(arguments, options, **shape, timeout_s=timeout_s)


def benchmark(
    name: str,
    arguments: argparse.Namespace,
    measure: Measure,
    report: Report,
    launches: Iterable[Launch] | None = None,
    *,
    shared_memory: bool = False,
) -> int:
    """The exit status. Every rank calls `measure`; `report` prints their rows and says what they come to.

    With `shared_memory`, DeepSpeed's sums over ranks may use the op that works where they are all of one host. What
    launches measured before one that failed is reported, too.
    """
    if is_rank():
        return serve(arguments, measure, shared_memory=shared_memory)
    try:
        status, parts, skipped = launch_all(arguments, launches or [Launch(arguments.ranks)])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if not parts:
        return status or 1
    quiet_libraries()
    rows = [{**row, "load_average": part["machine"]["load_average"]} for part in parts for row in part["rows"]]
    return conclude(arguments, name, parts[0]["machine"], report(arguments, rows, skipped)) or status


def conclude(arguments: argparse.Namespace, name: str, machine: dict[str, Any], found: Found) -> int:
    """Publish what there is: 1 if there is nothing, or where tokens differ."""
    rows, summary, charts = found
    if not rows and not summary:
        print("nothing was measured", file=sys.stderr)
        return 1
    publish(arguments, name, machine, rows, summary, charts)
    return int(summary.get("tokens_equal") is False)


def is_rank() -> bool:
    """Whether a launcher started this process as one of several ranks."""
    return "RANK" in os.environ


def serve(arguments: argparse.Namespace, measure: Measure, *, shared_memory: bool) -> int:
    """Measure as one of the ranks; rank 0 leaves the rows for who started it."""
    quiet_libraries()
    with report_errors():
        machine = describe_machine()
        world = join_world(arguments.threads, shared_memory=shared_memory, timeout_s=arguments.timeout)
        rows = measure(arguments, world)
        world.leave()
        if world.rank == 0:
            Path(arguments.part).write_text(json.dumps({"machine": machine, "rows": rows}, allow_nan=False))
    return 0


def launch_all(arguments: argparse.Namespace, launches: Iterable[Launch]) -> tuple[int, Rows, dict[str, str]]:
    """Start ranks again and again, which share the time of the run, until a launch fails; why some were left out."""
    deadline = time.monotonic() + arguments.timeout
    parts: Rows = []
    skipped: dict[str, str] = {}
    for launch in launches:
        if launch.rate != FREE and (reason := unavailable()):
            skipped[launch.name] = reason
            print(f"{launch.name}: not measured: {reason}", file=sys.stderr)
            continue
        if launch.text:
            print(launch.text, flush=True)
        with tempfile.TemporaryDirectory(prefix="megakv-benchmark-") as folder:
            path = Path(folder) / "part.json"
            left = max(0.0, deadline - time.monotonic())
            status = launch.start(arguments, [*launch.options, "--part", str(path)], left)
            if status == TIMED_OUT:
                print(f"not done after --timeout {arguments.timeout:g} s; ended. Raise it.", file=sys.stderr)
            if status:
                return status, parts, skipped
            parts.append(json.loads(path.read_text()))
    return 0, parts, skipped


def start_ranks(arguments: argparse.Namespace, options: Sequence[str], *, ranks: int, timeout_s: float) -> int:
    """As `Launch.start`, on this machine."""
    start = ["--num_accelerators", str(ranks), "--master_port", str(free_port()), "--no_local_rank"]
    script = [str(Path(sys.argv[0]).resolve()), *sys.argv[1:], *options]
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--quiet", *start, *script]
    clean_up_when_terminated()
    streams: Any = {"stdin": subprocess.DEVNULL, "env": rank_environment(arguments)}
    process = subprocess.Popen(command, start_new_session=True, **streams)
    try:
        return process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        return TIMED_OUT
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    finally:
        # SIGKILL to its whole process group: asked to terminate, deepspeed's runner ends others by name.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def clean_up_when_terminated() -> None:
    """Let an end by SIGTERM run what ends the processes that this one has started."""
    signal.signal(signal.SIGTERM, lambda signum, _: sys.exit(128 + signum))


def rank_environment(arguments: argparse.Namespace) -> dict[str, str]:
    """Environment of ranks: this process's, with their threads and accelerator."""
    # Console scripts of this environment, ninja among them, must be found where it is not activated.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": str(arguments.threads)}
    # Ranks that outnumber the GPUs run on the CPU.
    if torch.cuda.device_count() < arguments.ranks:
        environment.setdefault("DS_ACCELERATOR", "cpu")
    return environment


def free_port() -> int:
    """A TCP port that nobody uses at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def benchmark_alone(name: str, arguments: argparse.Namespace, run: Callable[[argparse.Namespace], Found]) -> int:
    """A benchmark of this process alone: 2 without its device, 1 after what users can mend or where tokens differ."""
    if getattr(arguments, "device", "cpu") == "cuda" and not torch.cuda.is_available():
        print("this machine has no CUDA GPU: nothing is measured; --device cpu tries the code", file=sys.stderr)
        return 2
    quiet_libraries()
    machine = describe_machine()
    if isinstance(getattr(arguments, "threads", None), int):
        torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    try:
        return conclude(arguments, name, machine, run(arguments))
    except (MegaKVError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
