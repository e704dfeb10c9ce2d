"""Anthropic's own client, in an environment of its own, against a server."""

import subprocess
from pathlib import Path

import pytest

from tests.unit.serving.conftest import MOST_S, NAME, Served, bytes_served  # noqa: F401

CALLS = Path(__file__).with_name("anthropic_calls.py")
PYTHON = CALLS.parents[2] / ".cache/clients/anthropic/bin/python"


FOLDER = PYTHON.parents[1].relative_to(CALLS.parents[2])
NEEDED = f"no {FOLDER}: python -m venv {FOLDER} && {FOLDER}/bin/pip install anthropic"


@pytest.mark.skipif(not PYTHON.exists(), reason=NEEDED)
def test_anthropic(bytes_served: Served) -> None:  # noqa: F811
    done = subprocess.run([PYTHON, CALLS, bytes_served.url, NAME], capture_output=True, text=True, timeout=MOST_S)
    assert done.returncode == 0, done.stderr
