"""launcher/run.py from end to end on a tiny model, however it is started."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megakv.tracking.page import page, read_runs
from megakv.tracking.report import RunReport, load_report
from tests.distributed.launch import ROOT, Launcher, Result, run_ranks
from tests.distributed.models import prose, save_model

RUN = ROOT / "launcher" / "run.py"
PROMPT_TOKENS = 203
NEW_TOKENS = 6
METHODS = ("all_gather", "pass_kv", "pass_q")
"""How prompts may attend: which is chosen depends on what was measured."""


class Job:
    """A model with a chat template, a prompt and a mesh."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.model = save_model(folder / "model", chat=True)
        self.prompt = folder / "prompt.txt"
        self.prompt.write_text(prose(PROMPT_TOKENS - 2))

    def arguments(self, cp: int, *more: str | Path) -> list[str | Path]:
        """Arguments of launcher/run.py; the outcome goes to ``out.json``."""
        config = self.folder / "config.json"
        config.write_text(json.dumps({"dtype": "fp32", "megakv": {"context_parallel": {"size": cp}}}))
        plain: list[str | Path] = ["--model", self.model, "--config", config, "--prompt-file", self.prompt]
        return [*plain, "--max-new-tokens", str(NEW_TOKENS), "--json", self.folder / "out.json", *more]

    def run(self, cp: int, *more: str | Path, launcher: Launcher) -> Result:
        """One run of the script itself."""
        return run_ranks(RUN, *self.arguments(cp, *more), ranks=cp, timeout=120, launcher=launcher).check()

    def outcome(self) -> RunReport:
        """What the last run wrote."""
        return load_report(self.folder / "out.json")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def check_outcome(outcome: RunReport, ranks: int, prompt_tokens: int = PROMPT_TOKENS) -> None:
    """The documented fields hold plausible values."""
    assert outcome.tokens_equal is True and outcome.dtype == "float32"
    # Special tokens may be among the new ones; the text leaves them out.
    assert 1 <= len(outcome.answers[0].answer.split()) <= NEW_TOKENS
    assert outcome.prompt_tokens == prompt_tokens and outcome.new_tokens == NEW_TOKENS
    assert outcome.settings["max_new_tokens"] == NEW_TOKENS
    assert outcome.ttft_s and outcome.ttit_s and outcome.generated_s
    assert 0 < outcome.ttit_s < outcome.generated_s and 0 < outcome.ttft_s < outcome.generated_s
    assert outcome.mesh == {"cp": ranks, "tp": 1}
    # The last token's keys and values are never needed.
    tokens = [rank.tokens for rank in outcome.ranks]
    assert sum(tokens) == prompt_tokens + NEW_TOKENS - 1 and max(tokens) - min(tokens) <= 1
    assert all(rank.host and rank.peak_bytes > rank.kv_bytes > 0 for rank in outcome.ranks)
    assert outcome.methods["prefill"].keys() <= {*METHODS, "local"}
    if ranks > 1:
        sent = [rank.bytes_sent for rank in outcome.ranks]
        assert all(found["logits"] >= 0 and any(found.get(name) for name in METHODS) for found in sent)
        assert outcome.methods["decode"].keys() == {"replicated"}
    assert {"torch", "transformers", "deepspeed", "megakv"} <= outcome.versions.keys()
    assert outcome.machine


def test_deepspeed_launcher(job: Job) -> None:
    picture = job.folder / "timeline.png"
    result = job.run(2, "--compare", "--timeline", picture, launcher="deepspeed")
    outcome = job.outcome()
    # Prompt, and what the chat template puts around it.
    check_outcome(outcome, ranks=2)
    answer = outcome.answers[0].answer
    assert result.stdout.count(answer) == 1, "streamed from rank 0 alone"
    assert result.stdout.index(answer) < result.stdout.index("TTFT")
    assert f"megakv: {PROMPT_TOKENS} tokens on CP 2 x TP 1" in result.stdout
    assert result.stdout.count("tokens are equal to those of a single-process transformers run") == 1
    assert "prefill: 100%" in result.stderr
    for line in (
        "prefill: auto took ",
        "decoding: auto took replicated queries",
        f"timeline: {picture}",
        f"report: {job.folder / 'out.json'}",
    ):
        assert result.stdout.count(line) == 1, line
    html = page(read_runs([job.folder / "out.json"]))
    assert answer.split()[0] in html and "replicated queries" in html and "data:image/png" in html
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") and picture.stat().st_size > 10_000


def sampled(job: Job, seed: int, launcher: Launcher = "forked") -> list[int]:
    job.run(2, "--compare", "--temperature", "0.9", "--top-p", "0.95", "--seed", str(seed), launcher=launcher)
    check_outcome(job.outcome(), ranks=2)
    return job.outcome().answers[0].tokens


def test_samples_as_a_single_process(job: Job) -> None:
    assert sampled(job, 3) != sampled(job, 4)


def torchrun(job: Job) -> None:
    assert sampled(job, 3, "torchrun") == sampled(job, 3)


def one_plain_process(job: Job) -> None:
    job.run(1, "--compare", "--no-chat-template", "--question", "aa bb cc", launcher="python")
    check_outcome(job.outcome(), ranks=1, prompt_tokens=PROMPT_TOKENS + 1)


@pytest.mark.drawn("launchers")
@pytest.mark.parametrize("start", [torchrun, one_plain_process])
def test_other_ways_to_start(job: Job, start: Callable[[Job], None]) -> None:
    start(job)
