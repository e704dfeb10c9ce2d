"""Several processes that offload on one host at once, each for itself (KVPR, Appendix A.7)."""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from threading import BrokenBarrierError
from typing import Any

from .offload_plan import Case

START_S = 300.0
"""How long one process waits for the others before a turn."""


def measure_processes(arguments: argparse.Namespace, case: Case) -> list[dict[str, Any]]:
    """The rows of a case of several processes, each with a link, a cache and a thread that computes of its own."""
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager, ProcessPoolExecutor(case.processes, context) as pool:
        barrier = manager.Barrier(case.processes)
        futures = [pool.submit(_measure, arguments, case, barrier) for _ in range(case.processes)]
        failures = [failure for future in futures if (failure := future.exception()) is not None]
        # Those that only waited for one that failed say less than it does.
        for failure in sorted(failures, key=lambda failure: isinstance(failure, BrokenBarrierError)):
            raise failure
        return merged([future.result() for future in futures])


def _measure(arguments: argparse.Namespace, case: Case, barrier: Any) -> list[dict[str, Any]]:
    """The rows of one process."""
    import torch

    from megakv.launcher.process import quiet_libraries

    from .offload_cells import CaseBench
    from .world import alone

    quiet_libraries()
    torch.set_num_threads(arguments.threads)
    assert case.link_gb_s is not None
    try:
        with alone():
            device = torch.device("cpu")
            bench = CaseBench(arguments, case, device, case.link_gb_s, ready=lambda: barrier.wait(START_S))
            # Every process takes the same turns: how many may not depend on a clock.
            return bench.measure(least=arguments.least_repeats, most=arguments.least_repeats, budget_s=0.0)
    except BaseException:
        barrier.abort()
        raise


def merged(processes: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """One row for each method, from the rows of every process: means of what each process had."""
    rows = []
    for found in zip(*processes, strict=True):
        row = dict(found[0])
        rounds = list(zip(*(each["seconds"] for each in found), strict=True))
        row["seconds"] = [statistics.mean(each) for each in rounds]
        row["process_seconds"] = [list(each) for each in rounds]
        row["tokens_per_s"] = row["batch"] / statistics.median(row["seconds"])
        row["tokens_equal"] = all(each["tokens_equal"] for each in found)
        for name in ("on_host", "recomputed", "compute_utilisation", "link_utilisation", "predicted_s", "cost_model_s"):
            row[name] = statistics.mean(each[name] for each in found)
        for name in ("prediction_errors", "cost_model_errors"):
            row[name] = [error for each in found for error in each[name]]
        rows.append(row)
    return rows
