"""What an engine promises beyond equal tokens: precision, memory, sessions, agreement, inputs and refusals."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import run_ranks

SCRIPT = Path(__file__).parent / "ranks" / "properties.py"
REFUSALS = {
    "labels": r"^labels is not supported with MegaKV",
    "output_attentions": r"^output_attentions is not supported with MegaKV",
    "4-D mask": r"^attention_mask must be a 2-D tensor",
    "empty prompt": r"^the prompt is empty: input_ids has shape \[1, 0\]",
    "all padding": r"^the prompt is empty: input_ids has no token that attention_mask keeps",
    "long prompt": r"^the prompt has 5000 tokens but the model has positions for 4096 \(max_position_embeddings\)",
    "long output": r"^prompt and output need 5010 positions .*at most 4086 new tokens",
    "assistant_model": r"^assistant_model = LlamaForCausalLM belongs to an engine",
    "guidance_scale": r"^generate\(guidance_scale=2\.0\) is not supported",
    "cache_implementation": r"^generate\(cache_implementation='static'\) is not supported",
    "session batch": r"^this session holds 1 sequences, input_ids has 2",
    "session cut": r"^cannot cut back to 1000 tokens: the session has 12",
    "closed": r"^this engine was destroyed; make a new one",
    "closed session": r"^this engine was destroyed; make a new one",
}


class Launches:
    """Figures by mesh."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._figures: dict[str, Any] = {}

    def figures(self, mesh: str) -> Any:
        """What the ranks of one mesh found, by check."""
        if mesh not in self._figures:
            self._figures[mesh] = {}
            folder = self._folder / mesh
            folder.mkdir()
            out = folder / "out.json"
            cp, tp = (int(part) for part in mesh.split("x"))
            run_ranks(SCRIPT, out, folder, mesh, ranks=cp * tp, timeout=400).check()
            self._figures[mesh] = json.loads(out.read_text())
        assert self._figures[mesh], f"the launch of {mesh} failed, see the first test that needed it"
        return self._figures[mesh]


@pytest.fixture(scope="module")
def launches(tmp_path_factory: pytest.TempPathFactory) -> Launches:
    return Launches(tmp_path_factory.mktemp("properties"))


@pytest.fixture(params=[pytest.param(mesh, marks=pytest.mark.drawn(1)) for mesh in ("4x1", "2x2", "2x1", "3x1")])
def mesh(request: pytest.FixtureRequest) -> str:
    return request.param


def root_mean_square(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))


def test_bf16_error_is_the_single_processs(launches: Launches, mesh: str) -> None:
    """RMS over 5 seeds of 1,024 positions each, against float64."""
    rows = launches.figures(mesh)["bf16_error"]["engine_and_single"]
    assert len(rows) == 5
    engine, single = (root_mean_square([row[column] for row in rows]) for column in (0, 1))
    assert 0 < single < 1
    assert engine <= 1.1 * single, (engine, single)


def test_every_rank_holds_its_share_of_the_cache(launches: Launches, mesh: str) -> None:
    found = launches.figures(mesh)["kv_memory"]
    cp, tp = (int(part) for part in mesh.split("x"))
    assert len(found["ranks"]) == cp * tp
    assert max(found["ranks"]) <= 1.05 / (cp * tp) * found["single"], found
    # Nothing is missing either; tensor parallelism copies no KV head here.
    assert sum(found["ranks"]) >= found["single"]


def test_turns_of_a_session_are_the_plain_models(launches: Launches, mesh: str) -> None:
    found = launches.figures(mesh)["session_turns"]
    assert len(found["equal"]) == 6 and all(found["equal"]), found
    assert found["spread"] <= 1


def test_rank_zero_decides(launches: Launches, mesh: str) -> None:
    """Seeds, clocks and stopping criteria differ from rank to rank."""
    found = launches.figures(mesh)["rank_zero_decides"]
    assert found["sampled"]
    *timed, stopped, streamed = zip(*found["lengths"], strict=True)
    for lengths in timed:
        assert len(set(lengths)) == 1 and 30 < lengths[0] < 530
    assert set(stopped) == {34}
    assert streamed[0] == 36 and set(streamed[1:]) == {0}
    assert found["ended"]


def test_steps_of_several_tokens(launches: Launches, mesh: str) -> None:
    """Random states, assistants and, in the end, processors differ from rank to rank."""
    found = launches.figures(mesh)["candidates"]
    assert len(found["equal"]) == 8 and all(found["equal"].values()), found["equal"]
    assert all("chose other tokens than rank 0" in text for text in found["messages"]), found["messages"]


def test_other_inputs(launches: Launches, mesh: str) -> None:
    found = launches.figures(mesh)["other_inputs"]
    assert len(found["errors"]) == 7
    assert {name: error for name, error in found["errors"].items() if not error <= 1e-5} == {}
    assert len(found["equal"]) == 8 and all(found["equal"].values()), found["equal"]


def test_refusals_name_the_argument_and_leave_the_engine_alive(launches: Launches, mesh: str) -> None:
    found = launches.figures(mesh)["refusals"]
    messages = found["messages"]
    assert messages.keys() == REFUSALS.keys()
    assert {name: text for name, text in messages.items() if not re.search(REFUSALS[name], text)} == {}
    assert found["alive"]
