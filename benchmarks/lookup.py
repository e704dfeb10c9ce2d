"""Prompt lookup: how many steps, and how much time, answers take that quote a document, and such that repeat nothing.

Answers of SmolLM2-135M-Instruct about the document of its recipe, with and without lookup in turns; the link to an
accelerator is EMULATED.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from harness.document import DOCUMENT, model_folder
from harness.launch import Found, Rows, Summary, benchmark_alone
from harness.options import DTYPES, Options
from harness.publish import show, show_summary
from harness.statistics import paired_ratio
from harness.timing import by_turns
from harness.world import alone
from tqdm import tqdm
from transformers import AutoTokenizer

import megakv

QUESTIONS = (
    "Repeat the first paragraphs of the handbook word for word.",
    "What does the handbook say about the first settlers? Quote it.",
)
PLACES: dict[str, dict[str, Any]] = {
    "memory": {},
    "link": {"enabled": True, "host_gb": 2.0, "method": "stream"},
    "link_auto": {"enabled": True, "host_gb": 2.0, "method": "auto"},
}
"""Where keys and values lie: sections ``offload``, but for the speed of the emulated link."""
KINDS: dict[str, dict[str, int]] = {"quotes": {}, "no repeats": {"no_repeat_ngram_size": 2}}
"""Without repeats no two tokens follow one another a second time: whatever is looked up is wrong."""


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    options = Options(__doc__)
    options.output()
    options.add("--quick", False, "short answers and one round: minutes")
    options.add("--model", "", "folder of a model (default: that of recipes/smollm2)")
    options.names("--places", PLACES, ",".join(PLACES), "where keys and values lie")
    options.add("--link", 0.1, "GB/s of the emulated link")
    options.choice("--dtype", DTYPES, "fp32", "of weights, keys and values")
    options.add("--threads", 1, "cores that compute")
    options.add("--document", {"": 1500, "quick": 600}, "tokens of the document")
    options.add("--new", {"": 96, "quick": 48}, "tokens of an answer")
    options.add("--lookup", 10, "tokens to look up")
    options.add("--repeats", {"": 5, "quick": 1}, "timed rounds")
    return options.parse(argv)


def measure(arguments: argparse.Namespace) -> Rows:
    """Times of all answers, one with and one without lookup in turns; tokens and steps."""
    model = str(model_folder(arguments.model)[0])
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    text = tokenizer(DOCUMENT.read_text(), return_tensors="pt").input_ids[:, : arguments.document]
    new = {"max_new_tokens": arguments.new, "min_new_tokens": arguments.new, "do_sample": False, "pad_token_id": 0}
    rows: Rows = []
    for place in arguments.places:
        offload = PLACES[place] | ({"emulated_link_gb_s": arguments.link} if PLACES[place] else {})
        with megakv.init_inference(model, {"dtype": arguments.dtype, "megakv": {"offload": offload}}) as engine:
            read = engine.session()
            read.generate(text, max_new_tokens=1, do_sample=False, pad_token_id=0)
            read.cut_back(text.shape[1])
            for (kind, own), number in tqdm([*product(KINDS.items(), range(len(QUESTIONS)))], desc=place):
                ids = tokenizer(f"\n\n{QUESTIONS[number]}\n\n", return_tensors="pt").input_ids
                answers: list[torch.Tensor] = []
                plain = partial(answer_s, engine, read, ids, answers, **new, **own)
                looked = partial(plain, prompt_lookup_num_tokens=arguments.lookup)
                seconds = by_turns({"seconds": plain, "lookup_seconds": looked}, arguments.repeats)
                row = {"place": place, "kind": kind, "question": number, "prompt": text.shape[1] + ids.shape[1]}
                said = engine.report().candidates
                row |= {"new": arguments.new, **seconds, "steps": said.steps, "accepted": said.accepted}
                row |= {"proposed": said.proposed}
                rows.append(row | {"tokens_equal": all(torch.equal(each, answers[0]) for each in answers)})
    return rows


def answer_s(engine: Any, read: Any, ids: torch.Tensor, answers: list[torch.Tensor], **options: Any) -> float:
    """Seconds behind the first token of an answer."""
    session = read.fork()
    answers.append(session.generate(ids, **options))
    report = engine.report()
    session.close()
    return float(report.generated_s - report.ttft_s)


def run(arguments: argparse.Namespace) -> Found:
    """Report how many tokens there are to a step of a kind of answers, and how many times as many to a second."""
    with alone():
        rows = measure(arguments)
    for row in rows:
        row["tokens_per_step"] = row["new"] / row["steps"]
        row["speedup"] = paired_ratio(row["seconds"], row["lookup_seconds"]).value
    show(rows, "place kind question prompt new steps proposed accepted tokens_per_step speedup tokens_equal")
    equal = all(row["tokens_equal"] for row in rows)
    found: Summary = {"tokens_equal": equal}
    for place, kind in dict.fromkeys((row["place"], row["kind"]) for row in rows):
        some = [row for row in rows if (row["place"], row["kind"]) == (place, kind)]
        both, looked = (
            [sum(each) for each in zip(*(row[name] for row in some), strict=True)]
            for name in ("seconds", "lookup_seconds")
        )
        found.setdefault(place, {})[kind] = {
            "fewer_steps": sum(row["new"] for row in some) / sum(row["steps"] for row in some),
            "speedup": paired_ratio(both, looked).to_json(),
        }
    summary = {"lookup": found, "tokens_equal": equal}
    show_summary(summary, "lookup")
    return rows, summary, []


if __name__ == "__main__":
    sys.exit(benchmark_alone("lookup", parse_arguments(), run))
