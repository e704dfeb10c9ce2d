"""Servers that a benchmark starts as a user does, by their commands, and ends with all their processes; and a client of
OpenAI's endpoints that notes when every token came, the same for all servers.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from megakv.base.errors import MegaKVError

from ..launch import clean_up_when_terminated, free_port, rank_environment
from ..rivals import RIVALS, environment

NAME = "model"
START_S, END_S = 600.0, 30.0
VLLM_CACHE_GB = 2
GREEDY = {"temperature": 0.0}


class Server:
    """A command in a ``with`` that answers OpenAI's calls at `url`."""

    def __init__(self, command: Sequence[str], environ: Mapping[str, str]):
        self._folder = tempfile.TemporaryDirectory(prefix="megakv-benchmark-")
        self._log = Path(self._folder.name) / "log"
        streams: Any = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        clean_up_when_terminated()
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
        """Status as the server has it."""
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
    """Server that `vllm serve` starts, on as many threads, of the environment that rivals.sh makes."""

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


@dataclass
class Reply:
    """An answer as far as it has come; times are of one clock."""

    sent: float = 0.0
    stamps: list[float] = field(default_factory=list)  # When each token came
    text: str = ""
    pieces: list[str] = field(default_factory=list)  # Tokens as text, where log probabilities were asked for
    progress: list[tuple[float, int]] = field(default_factory=list)  # When so many tokens of the prompt were read
    cached_tokens: int = 0
    left: bool = False  # The client went before the end

    @property
    def ttft(self) -> float:
        return self.stamps[0] - self.sent


class Client:
    """Client of one server, in an ``async with``."""

    def __init__(self, url: str):
        limits = httpx.Limits(max_connections=None)
        self._http = httpx.AsyncClient(base_url=f"{url}/v1", timeout=None, limits=limits, trust_env=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *ending: object) -> None:
        await self._http.aclose()

    async def complete(
        self,
        prompt: list[int],
        new_tokens: int,
        *,
        into: Reply | None = None,
        sampling: Mapping[str, Any] = GREEDY,
        pieces: bool = False,
        progress: bool = False,
        leaves: Callable[[Reply], bool] = lambda reply: False,
    ) -> Reply:
        """The answer of that many tokens, as a stream; the connection is closed once the client `leaves`."""
        reply = into or Reply()
        body: dict[str, Any] = {
            "model": NAME, "prompt": prompt, "max_tokens": new_tokens, "ignore_eos": True, **sampling,
            "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }  # fmt: skip
        body |= ({"logprobs": 0} if pieces else {}) | ({"return_progress": True} if progress else {})
        return await self._streamed("/completions", body, reply, leaves)

    async def chat(self, text: str, new_tokens: int, fields: Mapping[str, Any]) -> Reply:
        """The answer to a message, of up to so many tokens, as a stream."""
        body = {
            "model": NAME, "messages": [{"role": "user", "content": text}], "max_completion_tokens": new_tokens,
            **fields, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }  # fmt: skip
        return await self._streamed("/chat/completions", body, Reply(), lambda reply: False)

    async def _streamed(
        self, path: str, body: Mapping[str, Any], reply: Reply, leaves: Callable[[Reply], bool]
    ) -> Reply:
        reply.sent = time.perf_counter()
        async with self._http.stream("POST", path, json=body) as response:
            if response.status_code != 200:
                raise MegaKVError(f"{response.status_code}: {(await response.aread()).decode(errors='replace')[:500]}")
            async for line in response.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    _take(reply, json.loads(line[6:]))
                    if leaves(reply):
                        reply.left = True
                        break
        return reply


def _take(reply: Reply, event: dict[str, Any]) -> None:
    """Note what came."""
    now = time.perf_counter()
    if "error" in event:
        raise MegaKVError(f"the server's answer failed: {event['error']}")
    if progress := event.get("prompt_progress"):
        reply.progress.append((now, progress["processed"]))
    if usage := event.get("usage"):
        reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        # Several may come at once.
        reply.stamps += [now] * (usage["completion_tokens"] - len(reply.stamps))
    for choice in event.get("choices", ()):
        reply.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        if choice.get("logprobs"):
            reply.pieces += choice["logprobs"]["tokens"]
