"""scripts/gpu_claims.sh where there is no GPU: its parts start, write what they found, and end in time."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def claims() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_claims", ROOT / "scripts" / "gpu_claims.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_limits_add_up_to_what_is_rented(claims: ModuleType) -> None:
    parts = claims.PARTS
    assert len({part.name for part in parts}) == len(parts)
    # What is worth least may be left out.
    assert claims.SECONDS == 420 and sum(part.seconds for part in parts[:-1]) <= claims.SECONDS
    for part in parts:
        for words in (part.command, part.tiny):
            for path in (word for word in words.split() if word.endswith(".py")):
                assert (ROOT / path).exists(), path


def rehearsed(tmp_path: Path, *arguments: str) -> dict:
    command = [sys.executable, str(ROOT / "scripts" / "gpu_claims.py"), "--rehearse", "--out", str(tmp_path)]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=600, check=False)
    assert (tmp_path / "claims.json").exists(), done.stderr[-3000:]
    return json.loads((tmp_path / "claims.json").read_text())


def test_a_rehearsal_of_some_parts(tmp_path: Path) -> None:
    found = rehearsed(tmp_path, "--only", "large,kernels,fp8", "--seconds", "1000")
    assert found["rehearsed"] and not found["left_out"]
    large, kernels, fp8 = found["rows"]
    assert [row["ended"] for row in found["rows"]] == ["well"] * 3, (tmp_path / "log.txt").read_text()[-3000:]
    assert large["result"]["summary"]["cases"] and fp8["result"]["skipped"] > 5 and not fp8["result"]["failed"]
    assert {row["part"] for row in kernels["result"]["rows"]} == {"attention", "fp8", "kernels"}


@pytest.mark.full
def test_a_rehearsal_of_all_parts(tmp_path: Path) -> None:
    found = rehearsed(tmp_path, "--seconds", "3000")
    assert [row["ended"] for row in found["rows"]] == ["well"] * 11, (tmp_path / "log.txt").read_text()[-3000:]
    assert all(row["result"] for row in found["rows"])


def test_what_has_no_time_left_is_named(tmp_path: Path) -> None:
    found = rehearsed(tmp_path, "--only", "kernels,fairkv", "--seconds", "1")
    assert found["left_out"] == ["kernels", "fairkv"] and not found["rows"]


def test_what_takes_too_long_is_ended_with_all_that_it_started(claims: ModuleType) -> None:
    code = "import subprocess, sys; subprocess.Popen(['sleep', '100'], stdout=1); print('begun', flush=True); input()"
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == b"begun\n"
    assert claims._wait(process, 0.5) == "out of time"
    # Its child held the other end, too.
    assert process.stdout.read() == b""
