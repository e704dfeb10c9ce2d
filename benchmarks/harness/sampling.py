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
from torch import Tensor
from tqdm import tqdm

from megakv.base.errors import MegaKVError
from megakv.tracking.machine import peak_memory_bytes, reset_peak_memory

from .world import World

Bytes = dict[str, int]
TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 1e-2}
"""How far the results of two methods may lie apart, relative to the largest number of one."""


class Method:
    """One way to do what a benchmark measures, as one rank sees it."""

    compared = True  # Whether its result must be that of the others

    def __init__(self, name: str, *prepare: Callable[[], object]):
        self.name = name
        self._prepare = prepare

    def prepare(self) -> None:
        """Bring about the state that every run starts from, before the clock starts."""
        for step in self._prepare:
            step()

    def run(self) -> Any:
        """Do it once: what the clock measures. What it returns is alive until the clock has stopped."""
        raise NotImplementedError

    def duration(self, elapsed: float) -> float:
        """The sample, in seconds, that the last run gave, which took `elapsed` seconds."""
        return elapsed

    def counting(self) -> AbstractContextManager[Bytes]:
        """Around a run: filled at its end with the bytes that this rank sent, by operation. May slow the run down."""
        return nullcontext({})

    def result(self, output: Any) -> Tensor | None:
        """Result that all methods must agree on; None from a rank that took no part."""
        return None

    def facts(self, world: World, output: Any) -> dict[str, Any]:
        """Facts about the method that the untimed run shows. Every rank asks."""
        return {}


class Agreement:
    """Methods are only compared if they compute the same: the first one's results are what the others must equal."""

    def __init__(self, world: World, dtype: str):
        self._world, self._tolerance = world, TOLERANCE[dtype]
        self._first: tuple[str, Tensor] | None = None

    def check(self, name: str, result: Tensor | None) -> float:
        """The largest difference over all ranks, relative to the largest number."""
        if self._first is None:
            assert result is not None
            self._first = name, result.float()
        first, expected = self._first
        own = 0.0 if result is None else float((result.float() - expected).abs().max() / expected.abs().max())
        difference = max(self._world.gather(own))
        if not difference <= self._tolerance:
            raise MegaKVError(f"{name}: logits differ from those of {first} by {difference:.1e} of the largest")
        return difference


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
        self.peak_bytes = [*map(max, self.peak_bytes or peaks, peaks)]
        self.working_bytes = [*map(max, self.working_bytes or working, working)]

    def to_row(self, **context: Any) -> dict[str, Any]:
        own = {name: value for name, value in vars(self).items() if name not in ("method", "facts")}
        return {"method": self.method, **context, **own, **self.facts}


def measure(
    world: World,
    methods: Sequence[Method],
    agreement: Agreement,
    *,
    repeats: int,
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
            difference = agreement.check(method.name, method.result(output)) if method.compared else None
            samples.facts = {"max_logit_difference": difference, **method.facts(world, output)}
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
