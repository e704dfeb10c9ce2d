"""The rivals of benchmarks/rivals.py: what runs in which environment, and workers that answer prompt after prompt."""

from __future__ import annotations

import json
import os
import re
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self, TextIO

from megakv.base.errors import MegaKVError

from .launch import free_port
from .links import ROOT, unavailable

WORKERS = Path(__file__).with_name("rival_workers")
ENVIRONMENTS = ROOT / ".rivals"
START_S, TURN_S, END_S = 900.0, 900.0, 20.0  # To start, vLLM compiles
RATE = "1gbit"
CORES = 2  # For every rival; MegaKV and DeepSpeed have them as two ranks, too


@dataclass(frozen=True)
class Rival:
    """A way to run the model."""

    runs: str  # For the table
    worker: str
    library: str = ""  # Of several that one worker knows
    environment: str | None = None  # A folder of `ENVIRONMENTS`; None: the project's own environment
    ranks: int = 1
    hosts: bool = False  # A host for every rank
    weights: str = ""  # Where they are not of the type that is measured
    own: bool = False


TORCH, LLAMA_CPP, LLAMA_NATIVE = "torch_worker.py", "llama_cpp_worker.py", "llama_native_worker.py"
RIVALS = {
    "transformers": Rival("transformers", TORCH, "transformers"),
    "deepspeed": Rival("DeepSpeed", TORCH, "deepspeed"),
    "deepspeed_tp2": Rival("DeepSpeed, AutoTP on 2 ranks", TORCH, "deepspeed", ranks=2),
    "vllm": Rival("vLLM for CPUs", "vllm_worker.py", environment="vllm"),
    "llama_cpp": Rival("llama.cpp", LLAMA_CPP, environment="llama_cpp"),
    "llama_cpp_q4": Rival("llama.cpp, 4-bit weights", LLAMA_CPP, environment="llama_cpp", weights="q4_1"),
    "llama_native": Rival(
        "llama.cpp built here, 4-bit weights", LLAMA_NATIVE, environment="llama_native", weights="q4_1"
    ),
    "megakv": Rival("MegaKV", TORCH, "megakv", own=True),
    "megakv_q4": Rival("MegaKV, 4-bit weights", TORCH, "megakv", weights="q4_1", own=True),
    "megakv_q4_cp2": Rival("MegaKV, CP 2, 4-bit weights", TORCH, "megakv", ranks=2, weights="q4_1", own=True),
    "megakv_cp2": Rival("MegaKV, CP 2", TORCH, "megakv", ranks=2, own=True),
    "megakv_hosts": Rival("MegaKV, CP 2, two hosts", TORCH, "megakv", ranks=2, hosts=True, own=True),
}


@dataclass(frozen=True)
class Turn:
    """Answer of a rival to one prompt: seconds, tokens, and the peak memory of all its processes."""

    ttft_s: float
    ttit_s: float
    tokens: list[int]
    peak_bytes: int
    peak_of_turn: bool  # Else of the worker's life


class Worker:
    """A rival that has read the model and waits, asleep; a MegaKVError says why it cannot be had, or ended."""

    def __init__(
        self, name: str, model: Path, dtype: str, *, cores: Sequence[int], positions: int, weights: Path | None = None
    ):
        rival = self.rival = RIVALS[name]
        self._stack = ExitStack()
        self._folder = Path(self._stack.enter_context(TemporaryDirectory(prefix="megakv-rival-")))
        settings: dict[str, Any] = {
            "model": str(model),
            "dtype": dtype,
            "library": rival.library,
            "ranks": rival.ranks,
            "threads": max(1, len(cores) // rival.ranks),
            # Hosts of their own have cores of their own.
            "cores": [[core] for core in cores] if rival.hosts else [list(cores)],
            "positions": positions,
            "socket": str(self._folder / "socket"),
        }
        try:
            python = environment(rival)
            if weights is not None:
                settings["weights"] = str(weights)
            elif rival.weights or rival.worker == LLAMA_CPP:
                settings["weights"] = gguf(model, rival.weights or dtype)
            (self._folder / "settings.json").write_text(json.dumps(settings))
            self._start(python, settings)
        except BaseException:
            self.close()
            raise

    def _start(self, python: Path, settings: Mapping[str, Any]) -> None:
        self._listening = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        self._listening.bind(settings["socket"])
        self._listening.listen()
        command = [str(WORKERS / self.rival.worker), str(self._folder / "settings.json")]
        environ = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(settings["threads"]))
        if self.rival.hosts:
            from tests.hosts.cluster import Hosts

            made = self._stack.enter_context(Hosts(count=self.rival.ranks, rate=RATE, env=environ))
            running = made.start_deepspeed(*command)
            self._ended, self._said = running.ended, lambda: running.stdout + running.stderr
        elif self.rival.ranks > 1:
            launcher = ["-m", "torch.distributed.run", "--nproc-per-node", str(self.rival.ranks)]
            launcher += ["--master-port", str(free_port())]
            # As DeepSpeed's own launcher says it: its shared-memory sums crash without it.
            self._start_process([str(python), *launcher, *command], environ | {"LOCAL_SIZE": str(self.rival.ranks)})
        else:
            environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "1"}
            self._start_process([str(python), *command], environ | {"RANK": "0", "LOCAL_RANK": "0"})
        ready = sorted((self._accept() for _ in range(self.rival.ranks)), key=lambda each: each[0]["rank"])
        self.facts = ready[0][0]["facts"]
        self._ranks = [(link, lines) for _, link, lines in ready]

    def _start_process(self, command: list[str], environ: Mapping[str, str]) -> None:
        env = {**os.environ, "DS_ACCELERATOR": "cpu", **environ}
        with open(self._folder / "log", "wb") as log:
            streams: Any = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            process = subprocess.Popen(command, env=env, start_new_session=True, **streams)
        self._ended = lambda: process.poll() is not None
        self._said = lambda: (self._folder / "log").read_text(errors="replace")
        self._stack.callback(end, process)

    def _accept(self) -> tuple[dict[str, Any], socket.socket, TextIO]:
        """A rank that is ready."""
        deadline = time.monotonic() + START_S
        self._listening.settimeout(1)
        while True:
            try:
                link, _ = self._listening.accept()
                break
            except TimeoutError:
                if self._ended() or time.monotonic() > deadline:
                    raise MegaKVError(f"did not start: {self._last_words()}") from None
        self._stack.enter_context(link)
        link.settimeout(TURN_S)
        lines = self._stack.enter_context(link.makefile("r"))
        return self._heard(lines), link, lines

    def _heard(self, lines: TextIO) -> dict[str, Any]:
        try:
            said = lines.readline()
        except TimeoutError:
            raise MegaKVError(f"not done after {TURN_S:g} s") from None
        if not said:
            deadline = time.monotonic() + END_S
            while not self._ended() and time.monotonic() < deadline:
                time.sleep(0.1)
            raise MegaKVError(f"ended: {self._last_words()}")
        found: dict[str, Any] = json.loads(said)
        if "error" in found:
            raise MegaKVError(found["error"].splitlines()[0][:300])
        return found

    def _answers(self) -> list[dict[str, Any]]:
        """Answers of all ranks, as they come: a rank that fails says why, while others would wait for it."""
        waiting = {link: rank for rank, (link, _) in enumerate(self._ranks)}
        found: dict[int, dict[str, Any]] = {}
        while waiting:
            ready, _, _ = select.select(list(waiting), [], [], TURN_S)
            if not ready:
                raise MegaKVError(f"not done after {TURN_S:g} s")
            for link in ready:
                rank = waiting.pop(link)
                found[rank] = self._heard(self._ranks[rank][1])
        return [found[rank] for rank in range(len(found))]

    def _last_words(self) -> str:
        said = [line.strip() for line in self._said().splitlines() if line.strip()]
        errors = [line for line in said if re.match(r"[\w.\[\]: ]*(Error|Exception)\b|traceback : Signal", line)]
        return (errors or said or ["it said nothing"])[-1][:300]

    def turn(self, prompt: Sequence[int], new_tokens: int) -> Turn:
        """Greedy tokens that follow a prompt: the first, and so many more."""
        asked = json.dumps({"prompt": list(prompt), "new_tokens": 1 + new_tokens}) + "\n"
        for link, _ in self._ranks:
            link.sendall(asked.encode())
        ranks = self._answers()
        times, tokens = ranks[0]["times_s"], ranks[0]["tokens"]
        if len(tokens) != 1 + new_tokens:
            raise MegaKVError(f"gave {len(tokens)} tokens of the {1 + new_tokens} asked for")
        ttit_s = statistics.median(after - before for before, after in pairwise(times))
        peak = sum(rank["peak_rss_bytes"] for rank in ranks)
        return Turn(times[0], ttit_s, tokens, peak, all(rank["peak_of_turn"] for rank in ranks))

    def close(self) -> None:
        """End its processes."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def row_of(name: str, dtype: str, length: int, turns: Sequence[Turn], plain: Sequence[Turn]) -> dict[str, Any]:
    """A row of the results; `plain` are transformers' turns with the same prompts."""
    rival = RIVALS[name]
    found: dict[str, Any] = {
        "rival": name, "runs": rival.runs, "dtype": dtype, "weights": rival.weights or dtype, "context": length,
        "ranks": rival.ranks, "threads": CORES // rival.ranks, "seconds": [turn.ttft_s for turn in turns],
        "ttit_s": [turn.ttit_s for turn in turns], "peak_bytes": [turn.peak_bytes for turn in turns],
        "peak_of_turn": all(turn.peak_of_turn for turn in turns), "tokens": [turn.tokens for turn in turns],
    }  # fmt: skip
    if plain:
        # How many tokens answers begin with alike, in the worst round.
        differs = [
            next((at for at, (a, b) in enumerate(zip(one.tokens, same.tokens, strict=True)) if a != b), len(one.tokens))
            for one, same in zip(turns, plain, strict=False)
        ]
        found |= {"equal_tokens": min(differs), "tokens_equal": min(differs) == len(turns[0].tokens)}
    return found


def end(process: subprocess.Popen[bytes]) -> None:
    """Workers end when their connections do; what is left of the process group after a while is killed."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, 9)
    process.wait()


def environment(rival: Rival) -> Path:
    """The rival's Python; why it cannot be had where there is none."""
    if rival.hosts and (reason := unavailable()):
        raise MegaKVError(reason)
    return Path(sys.executable) if rival.environment is None else environment_of(rival.environment)


def environment_of(name: str) -> Path:
    """The Python of an environment that rivals.sh makes; why it cannot be had where there is none."""
    if (ENVIRONMENTS / name / "ready").exists():
        return ENVIRONMENTS / name / "bin" / "python"
    failed = ENVIRONMENTS / f"{name}.failed"
    raise MegaKVError(failed.read_text().strip() if failed.exists() else "run `bash benchmarks/rivals.sh` first")


def gguf(model: Path, kind: str) -> str:
    """The GGUF file of a model's weights in a type."""
    path = ENVIRONMENTS / "llama_cpp" / model.name / f"{kind}.gguf"
    if not path.exists():
        makes = "benchmarks/rivals.sh makes those of SmolLM2"
        raise MegaKVError(f"there is no GGUF file of {model.name} in {kind}; {makes}")
    return str(path)
