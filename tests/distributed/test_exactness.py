"""Every family on every mesh gives the plain model's tokens and, to 1e-4, its logits.

One launch of ranks runs many families. The quick set has Llama on all meshes with all methods, and draws some other
families, each with a mesh; `--full` has all families, meshes, lengths and kinds of generation.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megakv.attention.methods import decode_methods, prefill_methods
from tests.distributed.launch import run_ranks
from tests.families import FAMILIES

SCRIPT = Path(__file__).parent / "ranks" / "exactness.py"
TOLERANCE = 1e-4
AUTOCAST = ("autocast 65",)
PADDED = ("padded 50",)
# Root mean square error under autocast over transformers' own. TP rounds sums once more.
AUTOCAST_TOLERANCE = 2.0
MESHES = {4: ("4x1", "2x2", "1x4"), 3: ("3x1",), 2: ("2x1",)}
# The chain has tests of its own (test_runahead.py).
METHODS = {
    "prefill": tuple(name for name in prefill_methods() if name != "runahead"),
    "decode": decode_methods(),
}
RAGGED = ("ragged greedy", "ragged sampled", "ragged beams")
ALL_CASES = (*(f"greedy {length}" for length in (1, 2, 3, 5, 7, 64, 127, 1000)), *RAGGED)
# One token, more tokens than 2N (past every sliding window), and rows of different lengths.
SHORT_CASES = ("greedy 1", "greedy 65", "ragged beams")
LONG_FAMILIES = ("mistral", "llama_dynamic_rope", "falcon_alibi", "phi3_longrope")
# Fewer KV heads than four tensor-parallel ranks.
FEW_KV_HEADS = ("llama_tied", "llama_mqa", "falcon_mqa", "glm4")


@dataclass(frozen=True)
class Run:
    """One engine in a plan.

    Parameters
    ----------
    family, mesh : str
    section : dict
        Keys of ``megakv.context_parallel`` beside its size.
    """

    family: str
    mesh: str
    cases: tuple[str, ...] = ALL_CASES
    decoded: int = 8
    section: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """How the run is called in pytest's output."""
        return "-".join([self.family, self.mesh, *(f"{kind}={method}" for kind, method in self.section.items())])


def ranks_of(mesh: str) -> int:
    """Number of ranks of a mesh such as ``2x2``."""
    cp, tp = mesh.split("x")
    return int(cp) * int(tp)


def method_runs(mesh: str, cases: tuple[str, ...], decoded: int) -> list[Run]:
    """Llama with every method by name."""
    return [
        Run("llama", mesh, cases, decoded, {kind: method}) for kind, methods in METHODS.items() for method in methods
    ]


def quick_runs() -> list[Run]:
    """Llama on every mesh, with every method."""
    runs = [Run("llama", mesh, (*ALL_CASES, *AUTOCAST, *PADDED), decoded=4) for mesh in ("4x1", "2x2")]
    runs += [Run("llama", mesh, (*SHORT_CASES, *AUTOCAST, *PADDED), decoded=4) for mesh in ("1x4", "2x1")]
    runs += method_runs("4x1", ("greedy 3", "greedy 65", "ragged beams", *AUTOCAST, *PADDED), decoded=4)
    return runs


def drawn_runs() -> list[Run]:
    """Every other family on meshes with context parallelism; on one of both kinds each rank has slices of linears."""
    return [
        Run(family, mesh, (*SHORT_CASES, "greedy 1000") if family in LONG_FAMILIES else SHORT_CASES, 3, section)
        for family in FAMILIES
        for mesh, section in (("2x2", {"decode": "tensor"}), ("2x1", {}), ("4x1", {}))
        if family != "llama"
    ]


def full_runs() -> list[Run]:
    """Every family on every mesh with every case."""
    runs = [Run(family, mesh) for meshes in MESHES.values() for mesh in meshes for family in FAMILIES]
    runs += [Run(family, "2x2", section={"decode": "tensor"}) for family in FAMILIES if family != "llama"]
    return runs + [run for mesh in ("4x1", "2x2", "3x1", "2x1") for run in method_runs(mesh, ALL_CASES, decoded=8)]


QUICK, DRAWN, FULL = quick_runs(), drawn_runs(), full_runs()
FEW = [Run(family, "1x4", SHORT_CASES, decoded=3) for family in FEW_KV_HEADS]


class Launches:
    """Results by run; a launch of ranks is made when the first run of its size is asked for."""

    def __init__(self, folder: Path, runs: list[Run]):
        self._folder = folder
        self._runs = runs
        self._rows: dict[int, dict[str, Any]] = {}

    def result(self, run: Run) -> Any:
        """What one run came to."""
        ranks = ranks_of(run.mesh)
        if ranks not in self._rows:
            # Set first, so that a launch that fails is not repeated for every run.
            self._rows[ranks] = {}
            self._rows[ranks] = self._launch(ranks)
        assert run.name in self._rows[ranks], f"the launch of {ranks} ranks failed, see the first test that needed it"
        return self._rows[ranks][run.name]

    def _launch(self, ranks: int) -> dict[str, Any]:
        runs = [run for run in self._runs if ranks_of(run.mesh) == ranks]
        folder = self._folder / str(ranks)
        folder.mkdir()
        plan, out = folder / "plan.json", folder / "out.json"
        keys = ("family", "mesh", "cases", "decoded", "section")
        plan.write_text(json.dumps([{key: getattr(run, key) for key in keys} for run in runs]))
        run_ranks(SCRIPT, plan, out, folder, ranks=ranks, timeout=400 + 10 * len(runs)).check()
        return {run.name: row["result"] for run, row in zip(ordered(runs), json.loads(out.read_text()), strict=True)}


def ordered(runs: list[Run]) -> list[Run]:
    """Runs in the order in which the ranks take them: family by family."""
    families = list(dict.fromkeys(run.family for run in runs))
    return sorted(runs, key=lambda run: families.index(run.family))


@pytest.fixture(scope="module")
def launches(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, running: Callable[[str], list[Run]]
) -> Launches:
    runs = running("run")
    if request.config.getoption("--full"):
        full = {run.name: run for run in FULL}
        runs = [full[run.name] for run in runs]
    return Launches(tmp_path_factory.mktemp("exactness"), runs)


def parameters() -> list[Any]:
    """One test per run; with `--full`, all are those of the full set."""
    marks = {run.name: pytest.mark.full for run in FULL}
    marks |= {run.name: pytest.mark.drawn(8, "families") for run in DRAWN}
    marks |= {run.name: pytest.mark.drawn(1, "few KV heads") for run in FEW}
    quick = {run.name for run in QUICK}
    return [
        pytest.param(run, id=run.name, marks=[] if run.name in quick else marks[run.name])
        for run in {run.name: run for run in (*FULL, *FEW, *DRAWN, *QUICK)}.values()
    ]


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("run", parameters())
def test_tokens_and_logits_are_the_plain_models(launches: Launches, run: Run) -> None:
    result = launches.result(run)
    assert not isinstance(result, str), f"refused: {result}"
    assert [row["case"] for row in result]
    bounds = {case: AUTOCAST_TOLERANCE if case in AUTOCAST else TOLERANCE for case in (row["case"] for row in result)}
    wrong = [row for row in result if not (row.get("equal") and row["error"] <= bounds[row["case"]])]
    assert not wrong, wrong


def test_every_family_of_the_project_may_be_drawn() -> None:
    assert {run.family for run in (*QUICK, *DRAWN)} == set(FAMILIES)
    assert {run.name for run in (*QUICK, *DRAWN, *FEW)} <= {run.name for run in FULL}
