"""Offloaded keys and values over ranks: tokens are those of the plain model, with context and tensor parallelism."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megakv.offload.method import AUTO, METHODS
from tests.distributed.launch import run_ranks

SCRIPT = Path(__file__).parent / "ranks" / "exactness.py"
TOLERANCE = 1e-4
CASES = ("greedy 1", "greedy 65", "chunked 65", "ragged greedy", "ragged beams")
SPLIT = ("stream", "chunked", "cpu_rank", "both")
"""How tokens are split is known of these: by fixed costs, as a machine's own depend on what else it does."""
# Fixed costs are relative to the link's, whose speed then decides nothing but how long everything takes.
FAST = {"enabled": True, "host_gb": 0.05, "page_kib": 8, "chunk_tokens": 16, "emulated_link_gb_s": 0.02}
# A slow link: steps that show how fast it is, and that recomputing may pay for tiny models.
SLOW = {**FAST, "emulated_link_gb_s": 0.001}
# Weights off the accelerator too, and sequences in groups; recomputation pays or not.
COLUMNS = {**SLOW, "weights": True, "num_gpu_batches": 2, "emulated_link_gb_s": 0.05}
# Host memory for a few pages: the rest lies on disk.
BOTH = {**FAST, "method": "chunked", "host_gb": 6 * 8 / (1 << 20), "disk_gb": 0.02}
HOSTED = (("opt", "auto"), ("gpt_neox", "tsp"), ("llama", "auto"))
AS_LARGE = ("llama", "falcon")
"""Activations are no smaller than keys and values."""
Run = tuple[str, str, str, str]
RUNS: list[Run] = [
    (family, mesh, method, prefill)
    for family, mesh, prefill in (
        # Runs of one family come back together.
        ("opt", "2x1", "auto"),
        ("opt", "2x1", "runahead"),
        ("qwen3", "2x1", "auto"),
        ("gpt_neox", "2x1", "auto"),
        ("gpt_neox", "2x1", "tsp"),
        ("llama", "1x2", "auto"),
    )
    for method in ("stream", "chunked", *(["cpu_rank"] if (family, prefill) in HOSTED else []))
]
RUNS += [*((family, "2x1", "columns", "auto") for family in ("opt", "qwen3")), ("llama", "1x2", "columns", "auto")]
# With windows, in some layers and in all.
WINDOWS = [
    ("gemma3", "2x1", "auto", "auto"), ("mistral", "2x1", "cpu_rank", "auto"), ("mistral", "2x1", "stream", "tsp")
]  # fmt: skip
DRAWN = {"stream": 2, "chunked": 2, "cpu_rank": 1, "columns": 1}
"""Of the runs of a method, so many without `--full`."""
TRIED: Run = ("opt", "2x1", "auto", "auto")
MORE: list[Run] = [
    (family, "2x1", method, "auto")
    for family in ("opt", "llama", "llama_mha", "qwen3", "gpt_neox", "falcon", "gemma")
    for method in (*METHODS, AUTO, "columns", "both")
    if (family, "2x1", method, "auto") not in (*RUNS, TRIED, ("gemma", "2x1", "both", "auto"))
]
"""With ``--full`` alone."""
OFFLOAD = {"columns": COLUMNS, "both": BOTH, "auto": {**SLOW, "method": "auto"}}
Results = dict[Run, Any]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, running: Callable[[str], list[Run]]) -> Results:
    """Every run's cases, of one launch."""
    folder = tmp_path_factory.mktemp("offload")
    plan, out = folder / "plan.json", folder / "out.json"
    asked = list(dict.fromkeys([TRIED, *running("run")]))
    runs = [
        {
            "family": family,
            "mesh": mesh,
            "cases": CASES,
            "decoded": 6,
            "section": {"prefill": prefill},
            "even_costs": method in SPLIT,
            "offload": {"disk_path": str(folder), **OFFLOAD.get(method, {**FAST, "method": method})},
        }
        for family, mesh, method, prefill in asked
    ]
    plan.write_text(json.dumps(runs))
    run_ranks(SCRIPT, plan, out, folder, ranks=2, timeout=300 + 10 * len(asked)).check()
    families = list(dict.fromkeys(run[0] for run in asked))
    answered = sorted(asked, key=lambda run: families.index(run[0]))
    return dict(zip(answered, [row["result"] for row in json.loads(out.read_text())], strict=True))


def parameters() -> Iterator[Any]:
    """All runs; a mark on those that not every run of the tests takes."""
    for run in (TRIED, ("gemma", "2x1", "both", "auto")):
        yield pytest.param(run, id="-".join(run))
    for run in RUNS:
        yield pytest.param(run, id="-".join(run), marks=pytest.mark.drawn(DRAWN[run[2]], run[2]))
    for run in WINDOWS:
        yield pytest.param(run, id="-".join(run), marks=pytest.mark.drawn(1, "windows"))
    for run in MORE:
        yield pytest.param(run, id="-".join(run), marks=pytest.mark.full)


@pytest.mark.parametrize("run", parameters())
def test_tokens_are_the_plain_model_s(run: Run, results: Results) -> None:
    family, mesh, method, _ = run
    pays = method in ("chunked", "both") and mesh == "2x1" and family not in AS_LARGE
    for case in results[run]:
        assert "failure" not in case, case
        assert case["equal"] and case["error"] < TOLERANCE, case
        # Every tensor-parallel rank needs all activations but has only its heads: these are larger than what they save.
        # One token is on one rank: the other begins with the second.
        if case["case"] != "greedy 1" and method in SPLIT:
            assert (case["recomputed"] > 0) == pays, case
            assert (case["on_host"] > 0) == (method == "cpu_rank"), case


def test_ranks_try_the_same_plans(results: Results) -> None:
    cases = {case["case"]: case["plans"] for case in results[TRIED]}
    for name in ("chunked 65", "ragged greedy"):
        first, second = cases[name]
        # In passes of the prompt, and in the first steps, each rank goes by its own predictions.
        assert first[-3:] == second[-3:] and min(len(first), len(second)) >= 5, cases
