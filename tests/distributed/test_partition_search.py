"""``megakv search-partition`` from end to end: its table used by a run, and Ctrl-C."""

import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from megakv.base.partition import from_fractions
from megakv.runahead.table import load_table
from tests.distributed.launch import GRACE_S, ROOT, run_ranks
from tests.distributed.models import prose, save_model
from tests.patience import Patience, alive_after, status_within

RANKS = 3
SHORT, LONG = 96, 160


class Search:
    """A model, the JSON of a run, and the files of a search for it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.model = save_model(folder / "model")
        self.config = folder / "config.json"
        self.table = folder / "table.json"
        self.printed = ""
        self.configure()

    def configure(self, **runahead: Any) -> None:
        """Write the JSON."""
        parallel = {"size": RANKS, "prefill": "runahead"}
        section = {"context_parallel": parallel, "runahead": runahead}
        self.config.write_text(json.dumps({"dtype": "fp32", "megakv": section}))

    def arguments(self, *more: str | Path) -> list[str | Path]:
        plain: list[str | Path] = ["--model", self.model, "--config", self.config, "--table", self.table]
        return [*plain, "--contexts", f"{SHORT},{LONG}", "--step", "8", "--repeats", "1", *more]

    def read(self, tokens: int) -> dict[str, Any]:
        """A run with a prompt of so many tokens: what it wrote."""
        prompt, out = self.folder / "prompt.txt", self.folder / "out.json"
        prompt.write_text(prose(tokens))
        arguments = ["--model", self.model, "--config", self.config, "--prompt-file", prompt, "--json", out]
        run = run_ranks(ROOT / "launcher" / "run.py", *arguments, "--max-new-tokens", "1", ranks=RANKS, timeout=120)
        run.check()
        return {**json.loads(out.read_text()), "stderr": run.stderr}


@pytest.fixture(scope="module")
def search(tmp_path_factory: pytest.TempPathFactory) -> Search:
    """A search to its end."""
    search = Search(tmp_path_factory.mktemp("search"))
    run = run_ranks(ROOT / "launcher" / "search.py", *search.arguments(), ranks=RANKS, timeout=120).check()
    search.printed = run.stdout
    return search


@pytest.mark.drawn("ends")
def test_a_search_that_is_stopped_leaves_nothing_behind(tmp_path: Path) -> None:
    search = Search(tmp_path)
    # Slow enough for Ctrl-C to come in between.
    words = search.arguments("--repeats", "5")
    command = [sys.executable, "-m", "megakv.launcher.command", "search-partition", *map(str, words)]
    with open(tmp_path / "stderr", "w+") as stderr:
        process = subprocess.Popen(command, text=True, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True)
        said, patience = Path(stderr.name), Patience(120)
        try:
            while "best " not in said.read_text():
                assert process.poll() is None and not patience.over, said.read_text()
                time.sleep(0.02)
            started = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGINT)
            status_within(60, process)
        finally:
            process.kill()
    assert process.returncode == 130 and "stopped; " in said.read_text(), said.read_text()
    assert len(started) > RANKS and not alive_after(GRACE_S, started)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model", "stderr"]


def test_the_table_holds_what_was_searched(search: Search) -> None:
    table = load_table(search.table)
    assert (table.chain.ranks, table.chain.tp, table.chain.kv) == (RANKS, 1, "sharded")
    assert table.chain.fingerprint.ranks == RANKS and table.chain.model.dtype == "float32"
    short, long = table.entries
    assert (short.context, long.context) == (SHORT, LONG)
    assert short.even_ttft_s > 0 < long.even_ttft_s
    for entry in table.entries:
        assert entry.evaluations >= 3
        assert f"{' / '.join(map(str, from_fractions(entry.fractions, entry.context)))}\n" in search.printed
    assert (search.folder / "table.png").read_bytes().startswith(b"\x89PNG")


def test_runs_cut_their_prompts_by_the_table(search: Search) -> None:
    table = load_table(search.table)
    search.configure(table=str(search.table))
    for tokens in (random.choice((SHORT, LONG)), (SHORT + LONG) // 2):
        fractions = table.fractions(tokens)
        assert fractions is not None
        outcome = search.read(tokens)
        expected = list(from_fractions(fractions, tokens))
        assert [rank["tokens"] for rank in outcome["ranks"]] == expected
        assert outcome["prefill"]["partitions"] == [expected] and outcome["prefill"]["chosen"] == "runahead"
    outcome = search.read(LONG + 1)
    nearest = from_fractions(table.entries[-1].fractions, LONG + 1)
    assert [rank["tokens"] for rank in outcome["ranks"]] == list(nearest)
    assert outcome["stderr"].count(f"covers {SHORT} to {LONG} tokens, the prompt has {LONG + 1}") == 1


def test_tables_of_others_are_not_touched(search: Search) -> None:
    before = search.table.read_bytes()
    config = json.loads(search.config.read_text())
    config["dtype"] = "bf16"
    config["megakv"]["runahead"] = {}
    search.config.write_text(json.dumps(config))
    run = run_ranks(ROOT / "launcher" / "search.py", *search.arguments(), ranks=RANKS, timeout=120)
    assert run.returncode == 1 and not run.leftovers
    assert "was searched elsewhere: model's dtype 'float32', here 'bfloat16'" in run.stderr
    assert run.stderr.count("megakv: error: ") == 1
    assert search.table.read_bytes() == before
