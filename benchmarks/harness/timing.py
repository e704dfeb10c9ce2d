"""Timing in one process: calls that take turns, work on a device by its own clock, and tokens as they come."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from tqdm import tqdm
from transformers import LogitsProcessor, LogitsProcessorList

Call = Callable[[], object]
"""Function that is timed; one that returns a float has timed itself."""


def by_turns(calls: Mapping[str, Call], repeats: int, what: str = "") -> dict[str, list[float]]:
    """Seconds of every call in each round; a first round fills caches and starts threads."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in tqdm(range(repeats + 1), desc=what, disable=not what):
        for name, call in calls.items():
            begun = time.perf_counter()
            taken = call()
            seconds[name].append(taken if isinstance(taken, float) else time.perf_counter() - begun)
    return {name: taken[1:] for name, taken in seconds.items()}


class Watch:
    """Adds up the time between starts and ends of spans, on the device where it is not the CPU."""

    def __init__(self, device: torch.device):
        self._device = device
        self._spans: list[tuple[Any, Any]] = []

    @contextmanager
    def span(self) -> Iterator[None]:
        """Count what is started inside; may lie inside another watch's span."""
        start = self._mark()
        yield
        self._spans.append((start, self._mark()))

    def seconds(self) -> float:
        """Sum of the spans since the last call."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            total = sum(start.elapsed_time(end) for start, end in self._spans) / 1000
        else:
            total = sum(end - start for start, end in self._spans)
        self._spans.clear()
        return total

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


class StepClock(LogitsProcessor):
    """Notes when the logits of each step are there, and what probes say then: transformers calls it before it chooses.

    What other streams of an accelerator bring for the next step may go on.
    """

    def __init__(self, *probes: Callable[[], float]):
        self.times: list[float] = []
        self.noted: list[tuple[float, ...]] = []
        self._begun = time.perf_counter()
        self._probes = probes

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if scores.device.type != "cpu":
            get_accelerator().current_stream().synchronize()
        self.times.append(time.perf_counter())
        self.noted.append(tuple(probe() for probe in self._probes))
        return scores

    @property
    def prompt_s(self) -> float:
        """From when this clock was made until the prompt was read."""
        return self.times[0] - self._begun

    def seconds(self) -> list[float]:
        """From step to step."""
        return [later - earlier for earlier, later in itertools.pairwise(self.times)]


def clocked(
    generate: Callable[..., Any], ids: Tensor, new: int, clock: StepClock | None = None, **options: Any
) -> tuple[Any, StepClock]:
    """Greedy tokens for prompts without padding, and when each was there."""
    clock = clock or StepClock()
    # Without a mask, tokens that happen to be a model's padding would count as such.
    options |= {"attention_mask": torch.ones_like(ids), "max_new_tokens": new, "do_sample": False}
    return generate(ids, **options, logits_processor=LogitsProcessorList([clock])), clock
