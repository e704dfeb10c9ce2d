"""Placements of one model's heads, side by side: engines that read the same prompts in turn."""

from __future__ import annotations

import os
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from megakv.engine.engine import MegaKVEngine
from megakv.launcher.job import answer_of
from megakv.launcher.process import own_rank
from megakv.launcher.prompts import Prompt
from megakv.tracking.report import RunReport


@dataclass
class Placement:
    """An engine with its heads placed in one way, and what it did with every prompt."""

    name: str
    engine: MegaKVEngine
    reports: dict[str, RunReport] = field(default_factory=dict)  # By prompt, of its last reading.
    sequences: list[Tensor] = field(default_factory=list)  # Of all readings.
    step_s: list[float] = field(default_factory=list)  # Of all readings.

    def read(self, prompt: Prompt, ids: Tensor, options: dict[str, Any]) -> None:
        """Read a prompt, and answer. Every rank must call it."""
        self.sequences.append(self.engine.generate(ids.to(self.engine.mesh.device), **options))
        report = self.reports[prompt.source] = self.engine.report()
        self.step_s += report.step_s

    @property
    def median_s(self) -> float:
        """Of a step."""
        return statistics.median(self.step_s)

    @property
    def utilisation(self) -> float:
        """Mean load over the slowest rank's, by the tokens that were really kept: the mean over prompts."""
        return statistics.fmean(report.balance.kept_utilisation for report in self.reports.values() if report.balance)

    def values(self) -> dict[str, Any]:
        """For the result's JSON."""
        return {"step_s": self.median_s, "samples_s": self.step_s, "utilisation": self.utilisation}

    def shared_cores(self) -> tuple[int, int] | None:
        """Threads of the ranks on the busiest host, and its cores, where there are fewer."""
        ranks = next(iter(self.reports.values())).ranks
        threads = max(Counter(rank.host for rank in ranks).values()) * torch.get_num_threads()
        cores = len(os.sched_getaffinity(0))
        return (threads, cores) if self.engine.mesh.device.type == "cpu" and threads > cores else None

    def report(self, tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]) -> RunReport:
        """Of the first prompt all that was measured, and the answers to all."""
        last = self.sequences[-len(self.reports) :]
        first = next(iter(self.reports.values()))
        first.settings = settings
        first.answers = [
            answer_of(source, report, sequence, tokenizer)
            for (source, report), sequence in zip(self.reports.items(), last, strict=True)
        ]
        return first


def read_in_turn(
    placements: Sequence[Placement],
    prompts: Sequence[tuple[Prompt, Tensor]],
    options: dict[str, Any],
    *,
    repeats: int,
    seed: int,
) -> bool:
    """Let all placements read every prompt so often, and say whether their tokens are the same.

    They take turns, and in beginning: whatever else the machine does meets all alike. Every rank must call it.
    """
    bar = tqdm(
        desc="placements", unit="prompt", total=repeats * len(prompts) * len(placements), disable=own_rank() != 0
    )
    with bar:
        for repeat in range(repeats):
            for number, (prompt, ids) in enumerate(prompts):
                for placement in placements if (repeat + number) % 2 == 0 else placements[::-1]:
                    torch.manual_seed(seed + number)
                    placement.read(prompt, ids, options)
                    bar.update()
    first = placements[0].sequences
    return all(all(map(torch.equal, first, other.sequences)) for other in placements[1:])
