"""``megakv run`` from end to end: one document, several questions, and nothing left behind however it ends."""

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.distributed.launch import GRACE_S, ROOT, run_command
from tests.distributed.models import prose, save_model
from tests.patience import Patience, alive_after, status_within

DOCUMENT, NEW_TOKENS = 150, 5
QUESTIONS = ("aa bb", "cc dd ee", "ff")
START_S = 120


def command(*words: str | Path) -> list[str]:
    return [sys.executable, "-m", "megakv", "run", *map(str, words)]


def test_questions_share_one_prefill_of_standard_input(tmp_path: Path) -> None:
    document = tmp_path / "document.txt"
    document.write_text(prose(DOCUMENT))
    out, page = tmp_path / "out.json", tmp_path / "made" / "page.html"
    # It ends answers, sometimes: the next turn begins behind what ended them.
    model = save_model(tmp_path / "model", chat=True, eos_token_id=0)
    # What the user did not ask for must not stop the run.
    defaults = {"eos_token_id": 0, "cache_implementation": "hybrid", "num_beams": 2, "return_dict_in_generate": True}
    (model / "generation_config.json").write_text(json.dumps(defaults))
    asked = [word for question in QUESTIONS for word in ("--question", question)]
    words = command(model, "--cp", 2, "--dtype", "fp32", *asked, "--max-new-tokens", NEW_TOKENS, "--compare")
    words += ["--json", str(out), "--report", str(page)]
    result = run_command(["bash", "-c", f"cat {document} | {shlex.join(words)}"], timeout=240).check()
    outcome = json.loads(out.read_text())
    assert outcome["tokens_equal"] is True and outcome["mesh"] == {"cp": 2, "tp": 1}
    answers = outcome["answers"]
    assert [answer["question"] for answer in answers] == list(QUESTIONS)
    assert all(answer["tokens_equal"] and len(answer["tokens"]) == answer["new_tokens"] for answer in answers)
    # The document is in the first turn alone; what frames a question is a word or two.
    assert answers[0]["prompt_tokens"] == outcome["prompt_tokens"] > DOCUMENT
    assert all(answer["prompt_tokens"] < 10 and answer["ttft_s"] > 0 for answer in answers[1:])
    assert f"megakv: {model}: 2 ranks on this machine, CP 2 x TP 1" in result.stdout
    assert all(f"> {question}\n" in result.stdout for question in QUESTIONS)
    assert result.stdout.count("num_beams = 2 of the model's files is left out") == 1
    assert result.stderr.count("cache_implementation = 'hybrid' of the model's files is left out") == 1
    told = page.read_text()
    assert f"page: {page}" in result.stdout and told.startswith("<!DOCTYPE html>") and "not compared" not in told
    # Not a word from the launcher.
    assert "deepspeed" not in (result.stdout + result.stderr).lower().replace("[real_accelerator.py", ""), result.stderr


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_behind(ending: signal.Signals, tmp_path: Path) -> None:
    words = command(save_model(tmp_path / "model"), "--cp", 2, "--max-new-tokens", 10**6, "--prompt-file")
    # A pipe that has a name can be read once, too.
    words = ["bash", "-c", f"exec {shlex.join(words)} <(echo {prose(300)})"]
    with open(tmp_path / "out", "wb") as out, open(tmp_path / "err", "wb") as err:
        process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=err, cwd=ROOT)
    patience = Patience(START_S)
    family: list[psutil.Process] = []
    # Interrupted while it answers; killed while its ranks start.
    awaited = b"tokens on CP 2" if ending == signal.SIGINT else b"ranks on this machine"
    while awaited not in (tmp_path / "out").read_bytes() or len(family) < 3:
        assert process.poll() is None and not patience.over, (tmp_path / "err").read_text()
        time.sleep(0.2)
        family = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(ending)
    status_within(30, process)
    alive = alive_after(GRACE_S, family)
    for left in alive:
        left.kill()
    assert not alive, alive
    if ending == signal.SIGINT:
        assert process.returncode == 130
        said = (tmp_path / "err").read_text()
        assert said.endswith("megakv: interrupted\n") and "Traceback" not in said, said


def test_a_reader_that_has_seen_enough(tmp_path: Path) -> None:
    words = shlex.join(command(save_model(tmp_path / "model"), "--cp", 2, "--question", "aa bb"))
    done = run_command(["bash", "-c", f"set -o pipefail; {words} | head -1"], timeout=60)
    # As of any command that SIGPIPE ends.
    assert done.returncode == 141 and not done.leftovers and done.stderr == "", done
    assert done.stdout.endswith("2 ranks on this machine, CP 2 x TP 1\n") and done.stdout.count("\n") == 1
