"""Timing methods against each other: interleaved, started together, and as slow as the slowest rank."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator
from tqdm import tqdm

from megakv.tracking import peak_memory_bytes, reset_peak_memory

from .world import World

Bytes = dict[str, int]


class Method:
    """One way to do what a benchmark measures."""

    def __init__(self, name: str):
        self.name = name

    def prepare(self) -> None:
        """Bring about the state that every run starts from, before the clock does."""

    def run(self) -> Any:
        """Do it once: what the clock measures. What it returns is alive until the clock has stopped."""
        raise NotImplementedError

    def duration(self, elapsed: float) -> float:
        """The sample, in seconds, that the last run gave, which took `elapsed` seconds."""
        return elapsed

    def counting(self) -> AbstractContextManager[Bytes]:
        """Around a run: filled at its end with the bytes that this rank sent, by operation. May slow the run down."""
        return nullcontext({})


class Switched(Method):
    """A method before whose every run something is switched: the rate of links, or a competing flow."""

    def __init__(self, method: Method, state: str, switch: Callable[[], None], *, name: str | None = None):
        super().__init__(name or f"{method.name}, {state}")
        self.method, self.state = method, state
        self._switch = switch

    def prepare(self) -> None:
        self.method.prepare()
        # Nothing is under way but what ended the last run.
        self._switch()

    def run(self) -> Any:
        return self.method.run()

    def duration(self, elapsed: float) -> float:
        return self.method.duration(elapsed)

    def counting(self) -> AbstractContextManager[Bytes]:
        return self.method.counting()


@dataclass
class Samples:
    """Measurements of one method; what is listed per rank is in the order of ranks."""

    method: str
    bytes_sent: list[Bytes]  # By operation, per rank, of one run
    facts: dict[str, Any] = field(default_factory=dict)  # Found out about the method in its untimed run
    seconds: list[float] = field(default_factory=list)  # Of each repetition: the slowest rank's
    rank_seconds: list[list[float]] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)  # Per rank, at most in any repetition
    working_bytes: list[int] = field(default_factory=list)  # Of them, what was not in use before the repetition

    def add(self, runs: list[tuple[float, int, int]]) -> None:
        """Take up one repetition: seconds, peak and working bytes of every rank."""
        seconds, peaks, working = (list(column) for column in zip(*runs, strict=True))
        self.seconds.append(max(seconds))
        self.rank_seconds.append(seconds)
        self.peak_bytes = [max(pair) for pair in zip(self.peak_bytes or peaks, peaks, strict=True)]
        self.working_bytes = [max(pair) for pair in zip(self.working_bytes or working, working, strict=True)]

    def to_row(self, **context: Any) -> dict[str, Any]:
        return {
            "method": self.method,
            **context,
            "seconds": self.seconds,
            "bytes_sent": self.bytes_sent,
            "peak_bytes": self.peak_bytes,
            "working_bytes": self.working_bytes,
            "rank_seconds": self.rank_seconds,
            **self.facts,
        }


def measure(
    world: World,
    methods: Sequence[Method],
    *,
    repeats: int,
    inspect: Callable[[str, Any], dict[str, Any]],
    budget_s: float | None = None,
    least: int = 1,
) -> list[Samples]:
    """Run every method once untimed, then `repeats` times in turn. Every rank must call it."""
    results = []
    gc.collect()
    # What is there by now stays to the end: collections between the runs need not look at it.
    gc.freeze()
    with tqdm(total=len(methods) * (repeats + 1), desc="warm-up", unit="run", disable=world.rank != 0) as bar:
        for method in methods:
            bar.set_postfix_str(method.name)
            method.prepare()
            _settle(world)
            with method.counting() as sent:
                output = method.run()
            samples = Samples(method.name, world.gather(dict(sent)))
            samples.facts = inspect(method.name, output)
            results.append(samples)
            del output
            bar.update()
        started = time.perf_counter()
        for repeat in range(repeats):
            # Rank 0's clock decides, or ranks would part.
            if repeat >= least and budget_s is not None and world.gather(time.perf_counter() - started)[0] > budget_s:
                break
            bar.set_description(f"round {repeat + 1} of {repeats}")
            for turn in range(len(methods)):
                index = (repeat + turn) % len(methods)
                bar.set_postfix_str(methods[index].name)
                results[index].add(world.gather(_sample(world, methods[index])))
                bar.update()
    gc.unfreeze()
    return results


def _sample(world: World, method: Method) -> tuple[float, int, int]:
    """Seconds, peak bytes and working bytes of one run on this rank."""
    method.prepare()
    _settle(world)
    reset_peak_memory(world.device)
    before = peak_memory_bytes(world.device)
    world.barrier()
    start = time.perf_counter()
    output = method.run()
    get_accelerator().synchronize()
    seconds = time.perf_counter() - start
    peak = peak_memory_bytes(world.device)
    del output
    return method.duration(seconds), peak, peak - before


def _settle(world: World) -> None:
    """Leave no garbage of the run before: neither its collection nor its memory may count for the next."""
    gc.collect()
    if world.device.type != "cpu":
        get_accelerator().empty_cache()
    elif Path("/proc/self/maps").exists():
        # glibc keeps freed memory; a run in recycled memory would look smaller, and be faster, than one in its own.
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
