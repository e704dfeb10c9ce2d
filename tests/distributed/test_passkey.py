"""The passkey model finds what it was told, through the main job and over the turns of a session."""

import json
from pathlib import Path

import pytest

from megakv.tracking.report import load_report
from tests.distributed.launch import ROOT, Launcher, run_ranks

RECIPE = ROOT / "recipes" / "passkey"
RANKS = Path(__file__).parent / "ranks"


@pytest.mark.parametrize(
    ("config", "ranks", "tokens", "launcher"),
    [
        pytest.param("cp2_tp1.json", 2, 2048, "deepspeed", marks=pytest.mark.drawn("launchers")),
        ("cp2_tp2.json", 4, 2048, "forked"),
        pytest.param("cp2_tp2.json", 4, 4096, "deepspeed", marks=pytest.mark.full),
    ],
)
def test_main_job(tmp_path: Path, config: str, ranks: int, tokens: int, launcher: Launcher) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "timeline.png"
    arguments = [
        "--config",
        RECIPE / config,
        "--tokens",
        str(tokens),
        "--compare",
        "--json",
        out,
        "--timeline",
        picture,
    ]
    result = run_ranks(RECIPE / "ask.py", *arguments, ranks=ranks, timeout=180, launcher=launcher).check()
    values = load_report(out)
    [answer] = values.answers
    assert values.tokens_equal is True and answer.correct is True and answer.expected
    assert answer.answer.strip().startswith(answer.expected)
    assert values.ttft_s and values.ttit_s
    assert len(values.ranks) == ranks
    assert all(rank.tokens > 0 and rank.peak_bytes > 0 and rank.bytes_sent for rank in values.ranks)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "correct" in result.stdout and answer.expected in result.stdout


def test_users_own_text(tmp_path: Path) -> None:
    text = tmp_path / "own.txt"
    prose = "The harbour lay quiet in the rain, and nobody on the quay had anything to say about it. "
    text.write_text(prose * 20 + "The pass key is 71946. Remember it. 71946 is the pass key. " + prose * 15)
    out = tmp_path / "out.json"
    arguments = ["--config", RECIPE / "cp2_tp1.json", "--prompt-file", text, "--json", out]
    run_ranks(RECIPE / "ask.py", *arguments, ranks=2, timeout=120).check()
    assert load_report(out).answers[0].answer.strip().startswith("71946")


@pytest.mark.parametrize(
    ("mesh", "launcher"),
    [
        *(pytest.param(mesh, "forked", marks=pytest.mark.drawn(1)) for mesh in ("2x1", "4x1")),
        pytest.param("4x1", "deepspeed", marks=pytest.mark.full),
        pytest.param("2x2", "deepspeed", marks=pytest.mark.full),
    ],
)
def test_a_number_of_turn_one_is_found_in_turn_four(tmp_path: Path, mesh: str, launcher: Launcher) -> None:
    cp, tp = (int(part) for part in mesh.split("x"))
    out = tmp_path / "out.json"
    run_ranks(RANKS / "passkey.py", out, mesh, "1024", "5", ranks=cp * tp, timeout=180, launcher=launcher).check()
    answers = json.loads(out.read_text())
    assert len(answers) == 10
    # The model itself is right in more than 99 of 100 conversations.
    assert sum(correct for _, _, correct in answers) >= 9, answers
