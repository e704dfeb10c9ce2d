"""Short prompts whose layers are one call on ranks that share memory: exact, and as many bytes as are counted."""

import json
from pathlib import Path

import pytest

from tests.distributed.launch import run_ranks

SCRIPT = Path(__file__).parent / "ranks" / "short_prompts.py"


@pytest.mark.parametrize("cp", [2, pytest.param(3, marks=pytest.mark.full)])
def test_ranks_have_all_keys_in_one_call(cp: int, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    run_ranks(SCRIPT, cp, out, ranks=cp, timeout=240).check()
    for rank in json.loads(out.read_text()):
        assert [name for name, wrong in rank["wrong"].items() if wrong] == []
        # Of every layer, to each of the others, the longest of the ranks' messages.
        assert all(len(set(sent)) == 1 and sent[0] > 0 for sent in rank["sent"])
