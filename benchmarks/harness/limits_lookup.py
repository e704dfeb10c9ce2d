"""The part ``lookup``: answers that quote a document, and answers without repeats, with and without prompt lookup."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "smollm2"
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
FREE_OF_REPEATS = {"no_repeat_ngram_size": 2}
"""No two tokens follow one another a second time: whatever is looked up is wrong."""

Rows = list[dict[str, Any]]


def measure(arguments: argparse.Namespace) -> Rows:
    """Times of all answers, one with and one without lookup in turns; tokens and steps."""
    import torch
    from tqdm import tqdm
    from transformers import AutoTokenizer

    import megakv

    model = arguments.model or _smollm2()
    tokenizer = AutoTokenizer.from_pretrained(model)
    text = tokenizer((RECIPE / "document.md").read_text(), return_tensors="pt").input_ids[:, : arguments.document]
    rows: Rows = []
    kinds = (("quotes", {}), ("no repeats", FREE_OF_REPEATS))
    count = len(arguments.places) * len(kinds) * len(QUESTIONS) * 2 * (arguments.repeats + 1)
    progress = tqdm(total=count, desc="lookup", unit="answer")
    for place in arguments.places:
        offload = dict(PLACES[place])
        if offload:
            offload["emulated_link_gb_s"] = arguments.link
        with megakv.init_inference(model, {"dtype": arguments.dtype, "megakv": {"offload": offload}}) as engine:
            read = engine.session()
            read.generate(text, max_new_tokens=1, do_sample=False, pad_token_id=0)
            read.cut_back(text.shape[1])
            for kind, own in kinds:
                for number, question in enumerate(QUESTIONS):
                    ids = tokenizer(f"\n\n{question}\n\n", return_tensors="pt").input_ids
                    options = {"max_new_tokens": arguments.new, "min_new_tokens": arguments.new, "do_sample": False}
                    options |= {"pad_token_id": 0, **own}
                    row = {"place": place, "kind": kind, "question": number, "prompt": text.shape[1] + ids.shape[1]}
                    row |= {"new": arguments.new, "seconds": [], "lookup_seconds": []}
                    answers: list[torch.Tensor] = []
                    for turn in range(arguments.repeats + 1):
                        for key, lookup in (("seconds", {}), ("lookup_seconds", arguments.lookup)):
                            session = read.fork()
                            answer = session.generate(
                                ids, **options, **({"prompt_lookup_num_tokens": lookup} if lookup else {})
                            )
                            report = engine.report()
                            session.close()
                            answers.append(answer)
                            progress.update()
                            # The first round fills caches.
                            if turn:
                                row[key].append(report.generated_s - report.ttft_s)
                            if lookup:
                                row["steps"], row["accepted"] = report.candidates.steps, report.candidates.accepted
                                row["proposed"] = report.candidates.proposed
                    row["tokens_equal"] = all(torch.equal(each, answers[0]) for each in answers)
                    rows.append(row)
    progress.close()
    return rows


def report(rows: Rows) -> tuple[dict[str, Any], list[Any]]:
    """Of all answers of a kind: how many tokens there are to a step, and how many times as many to a second."""
    from .publish import show
    from .statistics import paired_ratio

    for row in rows:
        row["tokens_per_step"] = row["new"] / row["steps"]
        row["speedup"] = paired_ratio(row["seconds"], row["lookup_seconds"]).value
    show(rows, "place kind question prompt new steps proposed accepted tokens_per_step speedup tokens_equal")
    found: dict[str, Any] = {"tokens_equal": all(row["tokens_equal"] for row in rows)}
    for place in dict.fromkeys(row["place"] for row in rows):
        for kind in dict.fromkeys(row["kind"] for row in rows):
            some = [row for row in rows if (row["place"], row["kind"]) == (place, kind)]
            both = [sum(each) for each in zip(*(row["seconds"] for row in some), strict=True)]
            looked = [sum(each) for each in zip(*(row["lookup_seconds"] for row in some), strict=True)]
            found.setdefault(place, {})[kind] = {
                "fewer_steps": sum(row["new"] for row in some) / sum(row["steps"] for row in some),
                "speedup": paired_ratio(both, looked).to_json(),
            }
    return {"lookup": found, "tokens_equal": found["tokens_equal"]}, []


def _smollm2() -> str:
    sys.path.insert(0, str(RECIPE))
    from weights import FOLDER, prepare

    return str(prepare(FOLDER, None))
