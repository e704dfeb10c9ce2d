"""Ranks of one host, as DeepSpeed's launcher starts them, on the devices that were asked for."""

import json
import re
import sys
from pathlib import Path

import pytest

from megakv.launcher.host import devices
from tests.distributed.launch import ROOT, free_port, run_command

WORDS = ["--text", "two words, 'quoted'", "--local_rank_is_not_added"]
# Rank 0 waits to be ended.
MODULE = """
import json, os, sys, time
names = "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE", "MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES"
found = {"words": sys.argv[2:], **{name: os.environ[name] for name in names}}
with open(f"{sys.argv[1]}{found['RANK']}.part", "w") as file:
    json.dump(found, file)
os.rename(file.name, file.name.removesuffix(".part"))
while found["RANK"] == "1" and not os.path.exists(f"{sys.argv[1]}0"):
    time.sleep(0.01)
time.sleep(60) if found["RANK"] == "0" else sys.exit(3)
"""


def test_ranks_and_how_they_end(tmp_path: Path) -> None:
    (tmp_path / "told_what.py").write_text(MODULE)
    env = {"CUDA_VISIBLE_DEVICES": "GPU-5b,3,1", "DS_ACCELERATOR": "cpu", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    port, told = str(free_port()), str(tmp_path / "told")
    start = [sys.executable, "-m", "megakv.launcher.host", "2", port, "told_what", told]
    result = run_command([*start, *WORDS], timeout=120, env=env)
    assert result.returncode == 3 and not result.leftovers, result.stderr
    assert result.seconds < 60 and not result.stdout
    for rank in "01":
        world = {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        own = {"words": WORDS, "RANK": rank, "LOCAL_RANK": rank, "CUDA_VISIBLE_DEVICES": "GPU-5b,3"}
        assert json.loads(Path(told + rank).read_text()) == world | own


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        (None, [0, 1]), ("2,0,1", ["2", "0"]), ("MIG-1,MIG-2", ["MIG-1", "MIG-2"]),
        # Of fewer, and of none.
        ("3", ["3", ""]), ("0,", ["0", ""]), ("-1", ["-1", ""]), ("", ["", ""]),
    ],
)  # fmt: skip
def test_devices(asked: str | None, found: list[int | str]) -> None:
    assert list(devices(asked, 2)) == found


def test_an_accelerator_that_there_is_not() -> None:
    start = [sys.executable, "-m", "megakv.launcher.host", "2", str(free_port()), "told_what"]
    result = run_command(start, timeout=120, env={"DS_ACCELERATOR": "bogus"})
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert re.search("megakv: error: .*DS_ACCELERATOR.*bogus", result.stderr), result.stderr
