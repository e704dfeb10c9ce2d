"""Clients as they are published, in environments of their own, against a server: each file of calls is one's."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.unit.serving.conftest import MOST_S, NAME, Served, bytes_served  # noqa: F401

HERE = Path(__file__).parent
HOME = HERE.parents[1] / ".cache" / "clients"
CALLS = sorted(HERE.glob("*_calls.*"))


@pytest.mark.parametrize("calls", CALLS, ids=lambda calls: calls.stem.removesuffix("_calls"))
def test_client(calls: Path, bytes_served: Served, tmp_path: Path) -> None:  # noqa: F811
    of_node = calls.suffix == ".mjs"
    if not (HOME / ("node" if of_node else "python") / "ready").exists():
        pytest.skip("no environment of clients: bash tests/clients/setup.sh")
    words = [str(HOME / "python" / "bin" / "python"), str(calls)]
    if of_node:
        # Its packages are looked for beside it.
        words = ["node", shutil.copy(calls, HOME / "node")]
    own = {**os.environ, "HOME": str(tmp_path), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    words += [bytes_served.url, NAME]
    done = subprocess.run(words, capture_output=True, text=True, timeout=MOST_S, env=own, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
