"""Servers that a benchmark starts as a user does, by their commands, and ends with all their processes."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from megakv.base.errors import MegaKVError

from ..launch import free_port, rank_environment
from ..rivals import RIVALS, environment

NAME = "model"
START_S, END_S = 600.0, 30.0
VLLM_CACHE_GB = 2


class Server:
    """A command in a ``with`` that answers OpenAI's calls at `url`."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]):
        self._folder = tempfile.TemporaryDirectory(prefix="megakv-benchmark-")
        self._log = Path(self._folder.name) / "log"
        streams: Any = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, env=dict(environ), cwd=self._folder.name, start_new_session=True, **streams
            )
        self._family: list[psutil.Process] = []
        self.url = ""

    def __enter__(self) -> Self:
        deadline = time.monotonic() + START_S
        try:
            while not (found := self._listening()):
                if self._process.poll() is not None or time.monotonic() > deadline:
                    said = self._log.read_text(errors="replace").strip()[-2000:]
                    raise MegaKVError(f"the server {self._process.args!r} did not start: {said}")
                time.sleep(0.1)
        except BaseException:
            self.kill()
            raise
        self.url = found
        return self

    def __exit__(self, *ending: object) -> None:
        self.kill()
        self._folder.cleanup()

    def _listening(self) -> str:
        """Where, once it does."""
        found = re.search(r"at (http://\S+) \(pid \d+\)", self._log.read_text(errors="replace"))
        return found[1] if found else ""

    def kill(self) -> None:
        """SIGKILL to all its processes."""
        with suppress(psutil.NoSuchProcess):
            own = psutil.Process(self._process.pid)
            self._family = [*own.children(recursive=True), own]
        for each in self._family:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        self._process.wait(END_S)
        psutil.wait_procs(self._family, timeout=END_S)

    def rss(self) -> list[int]:
        """Resident memory of each rank."""
        found = {}
        for each in psutil.Process(self._process.pid).children(recursive=True):
            with suppress(psutil.Error):
                words, environ = each.cmdline(), each.environ()
                if "megakv.launcher.serve" in words and "--local_rank" not in words and "RANK" in environ:
                    found[int(environ["RANK"])] = each.memory_info().rss
        return [found[rank] for rank in sorted(found)]

    def status(self) -> dict[str, Any]:
        """What it says of itself."""
        found: dict[str, Any] = httpx.get(f"{self.url}/status", timeout=END_S).raise_for_status().json()
        return found

    def wait_until_idle(self) -> None:
        """Until nothing runs or waits."""
        deadline = time.monotonic() + END_S
        while (found := self.status())["running"] or found["waiting"]:
            if time.monotonic() > deadline:
                raise MegaKVError(f"the server is still at work {END_S:g} s after its last client left")
            time.sleep(0.02)


def megakv_server(arguments: argparse.Namespace, *words: object, **changes: Any) -> Server:
    """`megakv serve` on the benchmark's ranks and threads; `changes` are other values of its arguments."""
    own = argparse.Namespace(**{**vars(arguments), **changes})
    options = {"--name": NAME, "--port": 0, "--cp": own.ranks, "--dtype": own.dtype, "--threads": own.threads}
    options |= {"--max-gap": own.max_gap}
    command = [sys.executable, "-m", "megakv", "serve", own.model]
    command += [str(word) for option in options.items() for word in option]
    return Server([*command, *map(str, words)], rank_environment(own))


class VllmServer(Server):
    """What `vllm serve` starts, on as many threads, of the environment that rivals.sh makes."""

    def __init__(self, arguments: argparse.Namespace):
        python, self._port = environment(RIVALS["vllm"]), free_port()
        threads = arguments.ranks * arguments.threads
        cores = sorted(os.sched_getaffinity(0))[:threads]
        dtype = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[arguments.dtype]
        options = {"--model": arguments.model, "--port": str(self._port), "--served-model-name": NAME, "--dtype": dtype}
        command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--enable-prompt-tokens-details"]
        command += [word for option in options.items() for word in option]
        variables = {
            "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads), "VLLM_CPU_KVCACHE_SPACE": str(VLLM_CACHE_GB),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)), "VLLM_NO_USAGE_STATS": "1",
            "PATH": os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)]),
        }  # fmt: skip
        super().__init__(command, {**os.environ, **variables})

    def _listening(self) -> str:
        with suppress(httpx.HTTPError):
            if httpx.get(f"http://127.0.0.1:{self._port}/health", timeout=END_S).is_success:
                return f"http://127.0.0.1:{self._port}"
        return ""
