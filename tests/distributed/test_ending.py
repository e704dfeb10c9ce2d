"""The end of ranks: no thread outlives its group, whoever still holds engine and session, and failures do not wait."""

import json
from pathlib import Path

from tests.distributed.launch import run_ranks
from tests.families import llama

SCRIPT = Path(__file__).parent / "ranks" / "ending.py"


def test_threads_end_with_their_groups_and_a_failed_rank_leaves_at_once(tmp_path: Path) -> None:
    llama(dtype="float32").save_pretrained(tmp_path)
    # The exchange that rank 1 has under way would be waited for longer than that.
    result = run_ranks(SCRIPT, tmp_path, ranks=2, timeout=50)
    assert result.codes == (0, 1) and result.leftovers == [], result
    assert result.stderr.count("Traceback") == 1 and "RuntimeError: failed on purpose" in result.stderr
    found = json.loads((tmp_path / "threads.json").read_text())
    assert found["engine"] > found["world"] > found["before"], found
    # Engine and session are still held at both moments.
    assert found["destroyed"] == found["world"], found
    assert found["ended"] == found["before"], found
    assert "megakv.init_inference" in found["message"]
