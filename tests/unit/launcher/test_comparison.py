"""`--compare`: tokens that rounding decides are a near tie, others are not; logits are those along one sequence."""

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import megakv
from megakv.launcher import comparison
from megakv.launcher.comparison import GivenTurn, compare_turns, given_turn
from megakv.launcher.conversation import end_answer
from megakv.launcher.job import print_outcome, run_job
from megakv.launcher.prompts import questions
from megakv.launcher.run import parse_arguments
from megakv.tracking.page import page
from megakv.tracking.report import report_from_json, report_to_json
from tests.distributed.models import prose, save_model

NEW, TWINS = 12, 132
GREEDY: dict[str, Any] = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}


@pytest.fixture(autouse=True)
def one_core() -> Iterator[None]:
    """Plain transformers takes as many threads as there are cores, which wait for each other on a busy machine."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {random.choice(sorted(cores))})
    yield
    os.sched_setaffinity(0, cores)


def answered(engine: Any, prompts: Sequence[Tensor], **options: Any) -> list[GivenTurn]:
    """The turns of a session."""
    session, found = engine.session(), []
    for ids in prompts:
        end_answer(session, engine.module)
        output = session.generate(ids, return_dict_in_generate=True, output_logits=True, **options)
        found.append(given_turn(output.sequences[:, : -engine.report().new_tokens], output))
    return found


def twin_model(folder: Path, *, noise: float = 0.0) -> Path:
    """A model each of whose words has a twin with the same weights, but for noise."""
    save_model(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        for weight in (model.model.embed_tokens.weight, model.lm_head.weight):
            weight[TWINS:] = weight[:TWINS] * (1 + noise * torch.randn_like(weight[:TWINS]))
        model.lm_head.weight.mul_(8)
    model.save_pretrained(folder)
    return folder


def changed(source: Path, folder: Path, scale: float) -> Path:
    """The same model with one layer's values multiplied."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(scale)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_a_tie_is_told_from_a_difference(
    alone: None, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Several steps of an eager pass.
    monkeypatch.setattr(comparison, "SCORES_BYTES", 1 << 16)
    folder = twin_model(tmp_path / "model")
    wrong = changed(folder, tmp_path / "wrong", 1.5)
    prompts = [torch.randint(4, TWINS, (1, length)) for length in (90, 5)]
    with megakv.init_inference(folder, {"dtype": dtype}) as engine:
        answers = answered(engine, prompts, **GREEDY)
        # Kept from a word, the model takes its twin, which is as likely.
        word = int(answers[0].tokens[NEW // 2]) % TWINS
        others = answered(engine, prompts, suppress_tokens=[word], **GREEDY)
        first = int((answers[0].tokens == word).nonzero()[0]) + 1
        equal, logits = compare_turns(str(folder), engine, others, GREEDY, 0)
        assert not equal[0] and logits is not None and (logits.answer, logits.token) == (1, first)
        assert logits.near_tie and logits.gap <= logits.spread < (1e-3 if dtype == "fp32" else 1), logits
        # Other weights are another matter.
        equal, logits = compare_turns(str(wrong), engine, answers, GREEDY, 0)
        assert not all(equal) and logits is not None and not logits.near_tie, logits
        assert logits.difference > 2 * logits.spread


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_what_rounding_decides_is_no_error(
    alone: None, temperature: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = twin_model(tmp_path / "model", noise=0.002)
    words = ["--model", str(folder), "--question", prose(60), "--question", "aa bb", "--max-new-tokens", "24"]
    arguments = parse_arguments([*words, "--dtype", "bf16", "--compare", "--temperature", temperature])
    outcome = run_job(str(folder), arguments, lambda _: questions(None, arguments.question))
    report = outcome.report
    print_outcome(outcome)
    shown = capsys.readouterr().out
    assert not outcome.wrong
    if report.tokens_equal:
        # Tokens part in most runs: twins are as near to each other as rounding.
        assert report.logits is None and "tokens are equal to those of a single-process transformers run" in shown
        return
    assert report.tokens_equal is False and report.logits is not None and str(report.logits) in shown
    assert "tokens part from those of a single-process transformers run at a near tie, which rounding" in shown
    assert report_from_json(report_to_json(report)).logits == report.logits
    assert f"no, at a near tie: answer {report.logits.answer}, token" in page([("run", report)])
    report.logits = replace(report.logits, gap=2 * report.logits.spread)
    print_outcome(outcome)
    assert outcome.wrong and "tokens are DIFFERENT FROM those of a single-process" in capsys.readouterr().out
    assert "NO: answer" in page([("run", report)])
