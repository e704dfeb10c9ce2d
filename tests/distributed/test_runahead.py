"""KV-Runahead is exact on every partition, mesh and way to end: prompts, decoding, sessions."""

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import run_ranks
from tests.families import FAMILIES

SCRIPT = Path(__file__).parent / "ranks" / "runahead.py"
TOLERANCE = 1e-4
DECODED = 50
UNEVEN = {
    2: [0.6, 0.4],
    3: [0.5, 0.3, 0.2],
    4: [0.37, 0.28, 0.21, 0.14],
    8: [0.2, 0.17, 0.14, 0.13, 0.12, 0.1, 0.08, 0.06],
}
ABSURD = {
    2: [[0, 64], [64, 0], [1, 63]],
    3: [[0, 64, 0], [1, 1, 62]],
    # Of 5 tokens, fewer than 2N: without token counts they would go the way of decoding.
    4: [[0, 63, 0, 1], [1, 0, 1, 62], [64, 0, 0, 0], [1, 0, 3, 1]],
    8: [[0, 1, 0, 60, 0, 2, 1, 0], [1, 1, 1, 1, 1, 1, 1, 57]],
}
CASES = ("greedy 65", "greedy 3", "ragged greedy")
# A window, a soft cap with windows, sinks, ALiBi in two forms, latent attention, and unlike rotary frequencies.
SCORINGS = ("mistral", "gemma2", "gpt_oss", "falcon_alibi", "bloom", "deepseek_v3", "phi3_longrope")


@dataclass(frozen=True)
class Exact:
    """One engine and the prompts it is asked."""

    family: str
    mesh: str
    runahead: dict[str, Any]
    cases: tuple[str, ...] = CASES
    decoded: int = DECODED
    offload: dict[str, Any] | None = None
    check: str = field(default="exact", init=False)

    @property
    def ranks(self) -> int:
        """Number of ranks of the mesh."""
        cp, tp = self.mesh.split("x")
        return int(cp) * int(tp)

    @property
    def name(self) -> str:
        """How the run is called in pytest's output."""
        partition = "-".join(map(str, part)) if isinstance(part := self.runahead["partition"], list) else part
        offload = "" if self.offload is None else f"-{self.offload['method']}"
        return f"{self.family}-{self.mesh}-{self.runahead['kv']}-{partition}{offload}"


def runs(mesh: str) -> list[Exact]:
    """Llama with every partition, on one mesh."""
    size = int(mesh.split("x")[0])
    found = []
    for kv in ("sharded", "last"):
        found.append(Exact("llama", mesh, {"kv": kv, "partition": "even", "chunk_tokens": 7}))
        found.append(Exact("llama", mesh, {"kv": kv, "partition": UNEVEN[size]}))
        for index, partition in enumerate(ABSURD[size]):
            longest = 1000 if index % 2 else 9
            section = {"kv": kv, "partition": partition, "chunk_tokens": longest}
            found.append(Exact("llama", mesh, section, (f"greedy {sum(partition)}",)))
    return found


def family_runs(mesh: str, families: tuple[str, ...]) -> list[Exact]:
    """Other families, uneven, by turns with either way to end."""
    size = int(mesh.split("x")[0])
    return [
        Exact(
            name, mesh, {"kv": ("sharded", "last")[index % 2], "partition": UNEVEN[size], "chunk_tokens": 5}, CASES, 4
        )
        for index, name in enumerate(families)
    ]


TIERS = {"enabled": True, "page_kib": 8, "host_gb": 0.02, "emulated_link_gb_s": 0.001}
"""A slow link, on which the host's attention pays."""


def offloaded(family: str, mesh: str, method: str, **offload: Any) -> Exact:
    """What the last rank collects goes into its tiers."""
    chain = {"kv": "last", "partition": UNEVEN[int(mesh[0])], "chunk_tokens": 7}
    return Exact(family, mesh, chain, (*CASES, "chunked 65", "ragged beams"), 8, {**TIERS, **offload, "method": method})


# Longer answers follow the uneven partitions; with `--full` all answers are as long as it says above.
QUICK = [replace(run, decoded=20 if run.runahead["partition"] == UNEVEN[4] else 8) for run in runs("4x1")]
QUICK += family_runs("4x1", SCORINGS)
QUICK += [replace(run, decoded=8) for run in runs("2x2") if "even" in run.name]
QUICK += [
    # Most of it on disk; all that fits stays on the accelerator; weights come too, sequence by sequence; windows.
    offloaded("llama", "4x1", "stream", host_gb=6 * 8 / (1 << 20), disk_gb=0.02),
    offloaded("opt", "2x2", "auto", device_gb=4e-5),
    offloaded("qwen3", "4x1", "cpu_rank", weights=True, num_gpu_batches=2),
    offloaded("gemma3", "4x1", "auto"),
]
FULL = [
    *QUICK,
    *(run for mesh in ("2x1", "3x1", "4x1", "2x2", "8x1") for run in runs(mesh)),
    *family_runs("4x1", tuple(FAMILIES)),
    *family_runs("2x2", tuple(FAMILIES)),
]
ALL = {run.name: run for run in FULL}


def launch(folder: Path, plan: list[dict[str, Any]], ranks: int, timeout: float) -> Any:
    """What the ranks found, run by run."""
    (folder / "plan.json").write_text(json.dumps(plan))
    run_ranks(SCRIPT, folder / "plan.json", folder / "out.json", folder, ranks=ranks, timeout=timeout).check()
    return json.loads((folder / "out.json").read_text())


class Launches:
    """Results by run; the runs of one size share a launch."""

    def __init__(self, folder: Path, runs: list[Exact]):
        self._folder = folder
        self._runs = runs
        self._rows: dict[int, dict[str, Any]] = {}

    def result(self, run: Exact) -> Any:
        """What one run came to."""
        if run.ranks not in self._rows:
            self._rows[run.ranks] = {}
            together = [other for other in self._runs if other.ranks == run.ranks]
            (folder := self._folder / str(run.ranks)).mkdir()
            found = launch(folder, [asdict(other) for other in together], run.ranks, 1500)
            self._rows[run.ranks] = {other.name: row for other, row in zip(together, found, strict=True)}
        assert run.name in self._rows[run.ranks], "the launch failed, see the first test that needed it"
        return self._rows[run.ranks][run.name]


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory, running: Callable[[str], list[Exact]]) -> Launches:
    return Launches(tmp_path_factory.mktemp("runahead"), running("run"))


def marks(run: Exact) -> Any:
    """The quick set has even partitions on 4 ranks; of each other kind of its runs some are drawn."""
    if run.name not in {quick.name for quick in QUICK}:
        return pytest.mark.full
    partition = run.runahead["partition"]
    kinds = [(run.offload is not None, 2, "offloaded"), (run.family != "llama", 2, "scorings")]
    kinds += [(run.mesh == "2x2", 1, "tensor parallelism")]
    kinds += [(partition == UNEVEN[4], 1, "longer answers"), (partition in ABSURD[4], 3, "absurd")]
    return next((pytest.mark.drawn(count, kind) for fits, count, kind in kinds if fits), [])


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("run", [pytest.param(run, id=name, marks=marks(run)) for name, run in ALL.items()])
def test_tokens_and_logits_are_the_plain_models(launches: Launches, run: Exact) -> None:
    result = launches.result(run)
    assert [row["case"] for row in result] == list(run.cases)
    wrong = [row for row in result if not (row.get("equal") and row["error"] <= TOLERANCE)]
    assert not wrong, wrong
    if run.offload is not None:
        # The other ranks hold nothing.
        assert all(row["tiers"][-1] > 0 and not any(row["tiers"][: -int(run.mesh[2])]) for row in result), result


def judge_session(result: dict[str, Any], kv: str, ranks: int) -> None:
    assert all(result["long"]["equal"]) and len(result["long"]["equal"]) == 5
    assert all(result["long"]["branches"])
    assert all(all(turn) for turn in result["ragged"]["equal"])
    assert result["equal"]
    for counts, slots in zip(result["counts"], (301 + 2, 200 + 40 + 2), strict=True):
        # The last token of a turn is computed in the next one.
        assert [sum(rows) for rows in zip(*counts, strict=True)] == [slots, slots]
        if kv == "last":
            assert counts[:-1] == [[0, 0]] * (ranks - 1)


@pytest.mark.parametrize(
    ("mesh", "kv", "others"),
    [
        ("3x1", "last", [("3x1", "last", "runahead"), ("3x1", "sharded", "runahead"), ("3x1", "sharded", "pass_kv")]),
        pytest.param("4x1", "sharded", [("4x1", "last", "runahead")], marks=pytest.mark.full),
        pytest.param("2x2", "last", [("2x2", "sharded", "runahead")], marks=pytest.mark.full),
    ],
)
def test_sessions(tmp_path: Path, mesh: str, kv: str, others: list[tuple[str, str, str]]) -> None:
    """Turns of all lengths, forks, cutting back, saving; then going on with another end or another method.

    What a last rank collects is offloaded, or taken up by engines that offload.
    """
    cp, tp = (int(part) for part in mesh.split("x"))
    section = {"kv": kv, "partition": UNEVEN[cp], "chunk_tokens": 50}
    first_tiers, tiers = (TIERS, None) if kv == "last" else (None, TIERS)
    plan = [{"check": "sessions", "mesh": mesh, "runahead": section, "offload": first_tiers, "saved": "saved"}]
    for other, end, method in others:
        more = {"mesh": other, "runahead": {**section, "kv": end}, "method": method}
        offload = tiers if end == "last" else None
        plan.append({"check": "restore", "saved": "saved", "offload": offload, **more})
    first, *restored = launch(tmp_path, plan, cp * tp, 400)
    judge_session(first, kv, cp)
    assert all(result["equal"] and result["longer"] for result in restored), restored


@pytest.mark.full
def test_a_session_goes_on_on_fewer_ranks(tmp_path: Path) -> None:
    section = {"kv": "last", "partition": "even"}
    launch(tmp_path, [{"check": "sessions", "mesh": "4x1", "runahead": section, "saved": "saved"}], 4, 400)
    (result,) = launch(tmp_path, [{"check": "restore", "mesh": "2x1", "runahead": section, "saved": "saved"}], 2, 400)
    assert result["equal"] and result["longer"]


@pytest.mark.parametrize("kv", [pytest.param("sharded", marks=pytest.mark.full), "last"])
def test_promises_of_all_engines(tmp_path: Path, kv: str) -> None:
    """Every kind of input, beams that stop by rank 0's word, and the precision of a single process in bf16."""
    section = {"kv": kv, "partition": [0.4, 0.0, 0.35, 0.25], "chunk_tokens": 300}
    checks = ["other_inputs", "rank_zero_decides", *(["bf16_error"] if kv == "sharded" else [])]
    (found,) = launch(tmp_path, [{"check": "promises", "mesh": "4x1", "runahead": section, "checks": checks}], 4, 300)
    inputs, decided = found["other_inputs"], found["rank_zero_decides"]
    assert len(inputs["errors"]) == 7 and max(inputs["errors"].values()) <= 1e-5, inputs
    assert len(inputs["equal"]) == 8 and all(inputs["equal"].values()), inputs
    assert decided["sampled"] and decided["ended"]
    if kv == "sharded":
        engine, single = (
            sum(row[column] ** 2 for row in found["bf16_error"]["engine_and_single"]) ** 0.5 for column in (0, 1)
        )
        assert 0 < engine <= 1.1 * single


def test_counts_that_do_not_fit_the_prompt_are_refused(tmp_path: Path) -> None:
    section = {"partition": [10, 20, 30, 4]}
    (found,) = launch(tmp_path, [{"check": "refused", "mesh": "4x1", "tokens": 64, "runahead": section}], 4, 120)
    expected = r"megakv.runahead.partition = \[10, 20, 30, 4\] sums to 64 tokens, but a sequence of the prompt has 65"
    assert re.match(expected, found["message"]), found
    assert found["alive"]


def test_a_last_rank_without_room_is_refused_on_all_ranks(tmp_path: Path) -> None:
    tiers = {**TIERS, "host_gb": 8 * 8 / (1 << 20)}
    run = {"check": "refused", "mesh": "3x1", "tokens": 64, "refused": 250, "runahead": {"kv": "last"}}
    (found,) = launch(tmp_path, [{**run, "offload": tiers}], 3, 120)
    assert re.search(r"250 tokens so far, up to 2 more.* of which 64.00 KiB can be used", found["message"]), found
    assert found["alive"]
