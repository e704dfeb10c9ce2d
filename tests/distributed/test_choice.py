"""The choice of method on real ranks: measured evidence, every policy, exact bytes, and the commands that measure."""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megakv.costmodel.hardware import load_profile
from megakv.costmodel.stopwatch import LEAST_ROUNDS, ROUNDS
from megakv.forward.policy_fit import load_fit
from tests.distributed.launch import run_ranks
from tests.families import llama

SCRIPT = Path(__file__).parent / "ranks" / "choices.py"


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.full)])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("choice")
    out = folder / "out.json"
    run_ranks(SCRIPT, out, folder, ranks=request.param, timeout=300).check()
    return json.loads(out.read_text())


def test_bytes_are_predicted_exactly(results: dict[str, Any]) -> None:
    for rows in results["trials"]:
        assert len(rows) == 6
        for row in rows:
            assert row["wrong"] == {}, (results["seed"], row)


def test_measured_evidence_is_the_same_on_all_ranks(results: dict[str, Any]) -> None:
    first = results["profiles"][0]
    assert all(other == first for other in results["profiles"])
    _, _, reports, steps = first
    assert steps * LEAST_ROUNDS // ROUNDS <= reports <= steps
    assert all(0 < seconds < math.inf for seconds in results["predicted"])
    assert len({tuple(choices) for choices in results["decode"]}) == 1


def test_every_policy_yields_the_same_tokens(results: dict[str, Any]) -> None:
    tokens = results["engines"]
    assert set(tokens) == {"pass_kv", "nothing", "cost", "alg1", "alg5", "fitted", "slow"}
    assert all(answer == tokens["pass_kv"] for answer in tokens.values())


def test_reports_say_what_was_chosen_and_why(results: dict[str, Any]) -> None:
    first = results["plans"][0]
    assert all(plans == first for plans in results["plans"])
    for policy in ("pass_kv", "nothing", "alg1", "alg5", "fitted"):
        assert first[policy] == [None, None, None]
    # On links of ten seconds the prompt stays on one rank; where what is cached lies decides afterwards.
    alone = first["slow"][0]
    assert alone["chosen"] == "single"
    assert alone["partitions"] == [[0] * (len(results["plans"]) - 1) + [203]] * 2
    # The second turn of the conversation is short: after the first one's decoding it may go the way of decoding.
    for turn, length in ((0, 203), (2, 50)):
        plan = first["cost"][turn]
        predicted = plan["predicted_s"]
        assert set(predicted) == {"runahead", "pass_kv", "pass_q"} | ({"single"} if turn == 0 else set())
        assert plan["chosen"] == min(predicted, key=predicted.get)
        if plan["chosen"] in ("single", "runahead"):
            assert [sum(parts) for parts in plan["partitions"]] == [length + (turn > 0)] * 2
        else:
            assert plan["partitions"] is None


def test_bad_evidence_is_refused_on_all_ranks(results: dict[str, Any]) -> None:
    for messages in results["refusals"]:
        assert "processor 'another', here" in messages["foreign"]
        assert "the file of rank 1 differs from that of rank 0" in messages["own"]
        assert "is not valid JSON" in messages["half"]


def megakv(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megakv.launcher.command", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.full
def test_commands_measure_and_write(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path)
    profile, fit = tmp_path / "profile.json", tmp_path / "fit.json"
    result = megakv("profile", "--ranks", 2, "--seconds", 2, "--json", profile)
    assert result.returncode == 0, result.stderr
    shown = json.loads(result.stdout[result.stdout.index("{") :])
    measured = load_profile(profile)
    assert shown["machine"] == measured.fingerprint.model_dump()
    assert (measured.fingerprint.ranks, measured.ring_size, measured.fingerprint.dtype) == (2, 2, "float32")
    assert measured.host_memory_bytes == pytest.approx(2 * (measured.memory_bytes or 0), rel=0.01)
    assert 1e6 < measured.bandwidth < 1e12
    assert all(1e8 < table.flops < 1e15 for table in measured.attention)
    result = megakv(
        "fit-policy", "--ranks", 2, "--seconds", 3, "--tokens", 128, 1024, "--model", tmp_path, "--json", fit
    )
    assert result.returncode == 0, result.stderr
    fitted = load_fit(str(fit))
    assert len(fitted.points) > 4
    assert {point.new + point.cached for point in fitted.points} == {128, 1024}
    assert json.loads(result.stdout[result.stdout.index("{") :])["points"] == len(fitted.points)
    result = megakv("fit-policy", "--ranks", 2, "--tokens", 3, "--model", tmp_path, "--json", fit)
    assert result.returncode == 1
    assert "--tokens 3: allowed: 4 or more" in result.stderr
