"""Hosts on one machine: namespaces joined by rate-limited links, with ssh between them and a hostfile of them."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from tests.distributed.launch import ROOT, Result
from tests.hosts import secure_shell
from tests.hosts.control import VARIABLE, ControlServer
from tests.hosts.links import INTERFACE, SUBNET, Links
from tests.hosts.namespace import END_S, Namespace
from tests.hosts.running import Running
from tests.hosts.tools import find, search_path, unavailable

MOST_HOSTS = 100
SETUP = f"""\
folder=$1 sshd=$3
hostname "$2"
"$4" link set lo up
mount -t tmpfs tmpfs /dev/shm
mount --bind "$folder/hosts" /etc/hosts
{secure_shell.START}"""
# What ranks on another host are told of this process's settings. A real cluster passes on no more by itself.
PASSED = ("CUDA_", "DS_", "GLOO_", "HF_", "MEGAKV_", "MKL_", "MPL", "NCCL_", "OMP_", "TORCH", "TOKENIZERS_", "WANDB_")


@dataclass(frozen=True)
class Measurement:
    """What a link was found to do.

    Attributes
    ----------
    bits_per_s : float
        Payload of one TCP connection; headers take 4.5% of a limited link.
    round_trip_s : float
        Median of single bytes there and back.
    """

    bits_per_s: float
    round_trip_s: float


class Hosts:
    """Hosts ``host1``, ``host2`` ... on this machine, for as long as the ``with`` block lasts.

    Each has network, host name, process numbers, ``/dev/shm`` and ``/etc/hosts`` of its own; files, cores and memory
    are shared. They reach one another, by ssh too, and nothing else. Two sets of hosts do not see each other. When
    this process ends, however it ends, they end.

    Parameters
    ----------
    count : int
        How many.
    slots : int
        Ranks on each, for the hostfile.
    rate : str or sequence of str, optional
        Limit of every host's link in each direction, such as ``"1gbit"``; or one for each host. None: unlimited.
    env : dict, optional
        Environment of ranks, on top of the defaults: CPU, one thread, this checkout and this Python first in the
        search paths, gloo and NCCL on the hosts' interface.
    spare : int
        Hosts beyond `count` that the hostfile does not name: no rank is started there.

    Attributes
    ----------
    folder : Path
        Temporary; keys, settings, outputs.
    names, addresses : list of str
    hostfile : Path
        For deepspeed.

    Raises
    ------
    RuntimeError
        If this machine cannot make hosts: what it lacks.
    ValueError
        If an argument is impossible.
    """

    def __init__(
        self,
        *,
        count: int = 2,
        slots: int = 1,
        rate: str | Sequence[str | None] | None = None,
        env: dict[str, str] | None = None,
        spare: int = 0,
    ):
        if count < 1 or not 0 <= spare <= MOST_HOSTS - count:
            raise ValueError(f"count = {count} and spare = {spare}: allowed: 1 to {MOST_HOSTS} hosts together")
        if slots < 1:
            raise ValueError(f"slots = {slots}: allowed: 1 or more ranks on each host")
        whole = count + spare
        self.rates = [rate] * whole if rate is None or isinstance(rate, str) else list(rate)
        if len(self.rates) != whole:
            raise ValueError(f"rate = {rate}: {len(self.rates)} rates for {whole} hosts")
        self.names = [f"host{index + 1}" for index in range(whole)]
        self.slots = slots
        self._count = count
        self._env = env or {}
        self._stack = ExitStack()
        self._machines: list[Namespace] = []
        self._links: Links | None = None
        self._running: Running | None = None

    def __enter__(self) -> Self:
        if reason := unavailable():
            raise RuntimeError(f"hosts cannot be made on this machine: {reason}")
        try:
            self._start()
        except BaseException:
            self.close()
            raise
        return self

    def _start(self) -> None:
        self.folder = Path(
            self._stack.enter_context(tempfile.TemporaryDirectory(prefix="megakv-hosts-", ignore_cleanup_errors=True))
        )
        self.addresses = [f"{SUBNET}.{index + 1}" for index in range(len(self.names))]
        known = [f"{address} {name}" for name, address in zip(self.names, self.addresses, strict=True)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *known, ""]))
        self.hostfile = self.folder / "hostfile"
        self.hostfile.write_text("".join(f"{name} slots={self.slots}\n" for name in self.names[: self._count]))
        secure_shell.prepare(self.folder)
        for name in self.names:
            machine = Namespace(SETUP, str(self.folder), name, find("sshd"), find("ip"))
            self._machines.append(self._stack.enter_context(machine))
        self._links = self._stack.enter_context(closing(Links(self._machines)))
        for index, rate in enumerate(self.rates):
            self._links.set_rate(index, rate)
        self._stack.enter_context(closing(ControlServer(self.folder / "control", self.set_rate)))

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End all hosts and what runs on them. May be called again."""
        if self._running is not None:
            self._running.kill()
        self._stack.close()

    # Links

    def set_rate(self, rate: str | None, host: int | None = None) -> None:
        """Change the limit of one host's link, or of all, at once; also while ranks run.

        Lifting a limit drops what waits at it, so do that between messages.

        Raises
        ------
        ValueError
            If the rate is not one.
        """
        assert self._links is not None, "hosts that were not started"
        for index in range(len(self.names)) if host is None else [host]:
            self._links.set_rate(index, rate)
            self.rates[index] = rate

    def measure(self, source: int = 0, target: int = 1, *, seconds: float = 0.5) -> Measurement:
        """Send from one host to another for a while, and see.

        Raises
        ------
        RuntimeError
            If the transfer fails.
        """
        script = [sys.executable, "-S", str(Path(__file__).with_name("throughput.py"))]
        listener = subprocess.Popen(
            self._machines[target].enter(*script, "listen", str(seconds)), stdout=subprocess.PIPE, text=True
        )
        with listener:
            assert listener.stdout is not None
            try:
                if listener.stdout.readline() != "ready\n":
                    raise RuntimeError(f"{self.names[target]} cannot listen")
                trip = self._machines[source].run(*script, "send", self.addresses[target])
                measured = Measurement(json.loads(listener.stdout.readline()), json.loads(trip))
                # Killed, it would leave its process on the host for as long as that takes to end.
                listener.wait(END_S)
                return measured
            finally:
                listener.kill()

    def on_network(self, host: int, command: Sequence[str]) -> list[str]:
        """The command line that runs a command on a host's network, but not among its processes: as equipment would."""
        return self._machines[host].enter(*command, kinds=("net",))

    # Processes

    def processes(self, host: int | None = None) -> list[psutil.Process]:
        """What runs on one host, or on all, beside the hosts' own ssh servers."""
        machines = self._machines if host is None else [self._machines[host]]
        return [process for machine in machines for process in machine.processes()]

    def environment(self, env: dict[str, str] | None = None) -> dict[str, str]:
        """What ranks see of the environment, on every host."""
        python_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
            **{name: value for name, value in os.environ.items() if name.startswith(PASSED)},
            "PYTHONPATH": python_path,
            # Console scripts of this environment, ninja among them, where it is not activated.
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), search_path()]),
            "GLOO_SOCKET_IFNAME": INTERFACE,
            "NCCL_SOCKET_IFNAME": INTERFACE,
            VARIABLE: str(self.folder / "control"),
            **self._env,
            **(env or {}),
        }

    def start(
        self, command: Sequence[str], *, env: dict[str, str] | None = None, cwd: str | Path = ".", capture: bool = True
    ) -> Running:
        """Start a command on the first host.

        Parameters
        ----------
        command : sequence of str
            ``{hostfile}`` in it becomes the hostfile's path.
        env : dict, optional
            Variables on top of `environment`, for the ranks of a deepspeed launcher too.
        cwd : path
            Where it runs.
        capture : bool
            Whether to keep its output; else it goes where this process's goes, and input comes from there.

        Raises
        ------
        RuntimeError
            If another command is under way.
        ValueError
            If a variable cannot be passed on unchanged.
        """
        if self._running is not None and not self._running.ended():
            raise RuntimeError("a command is under way on these hosts; one at a time")
        variables = self.environment(env)
        run = Path(tempfile.mkdtemp(prefix="run-", dir=self.folder))
        # The launcher's own file for the environment of remote ranks, read in place of one in the working folder.
        (run / "deepspeed_env").write_text("".join(f"{name}={_line(name, variables[name])}\n" for name in variables))
        path = os.pathsep.join([str(self.folder / "bin"), variables["PATH"]])
        full_env = {**os.environ, **variables, "PATH": path, "DS_ENV_FILE": str(run / "deepspeed_env")}
        filled = [word.replace("{hostfile}", str(self.hostfile)) for word in command]
        # The working folder does not survive entering the host's mounts.
        entered = self._machines[0].enter("env", f"--chdir={Path(cwd).resolve()}", *filled)
        self._running = Running(entered, full_env, self.processes, run if capture else None)
        return self._running

    def run(self, command: Sequence[str], *, timeout: float, env: dict[str, str] | None = None) -> Result:
        """Run a command on the first host to its end, or until all that runs on the hosts is killed for its time."""
        return self.start(command, env=env).wait(timeout)

    def start_deepspeed(self, script: str | Path, *args: str | Path, env: dict[str, str] | None = None) -> Running:
        """Start a script as ranks on all slots of all hosts, through deepspeed's pdsh launcher.

        Raises
        ------
        ValueError
            If an argument or a variable cannot be passed on unchanged.
        """
        runner = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(self.hostfile)]
        options = ["--launcher", "pdsh", "--force_multi", "--no_local_rank"]
        words = [_remote_word(str(word)) for word in (Path(script).resolve(), *args)]
        return self.start([*runner, *options, *words], env=env)

    def run_deepspeed(
        self, script: str | Path, *args: str | Path, timeout: float, env: dict[str, str] | None = None
    ) -> Result:
        """`start_deepspeed`, to its end as in `run`."""
        return self.start_deepspeed(script, *args, env=env).wait(timeout)


def _remote_word(word: str) -> str:
    """A word of a command line, written so that deepspeed and pdsh bring it through the remote shell unchanged."""
    if "%" in word:
        raise ValueError(f"argument {word!r}: pdsh puts host names in place of some words with %")
    if " " not in word:
        return shlex.quote(word)
    # deepspeed puts words with spaces between double quotes and escapes double quotes in them, no more.
    return re.sub(r"([\\$`])", r"\\\1", word)


def _line(name: str, value: str) -> str:
    """A value of an environment file; deepspeed puts it between double quotes where needed, and escapes nothing."""
    if re.search(r'["$`\\\n%]', value):
        raise ValueError(f"{name}={value!r}: deepspeed cannot pass this value on to other hosts")
    return value
