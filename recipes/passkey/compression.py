"""Measure what compressing the cache costs: the number must be found by a question that comes after compression.

Usage: ``python recipes/passkey/compression.py``. What is measured already is read from the output and not repeated, so
a run that was stopped goes on; ``--fresh`` starts anew.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from prose import SEPARATOR
from task import MODEL_DIR, Document, document, is_correct, load_tokenizer, question
from transformers import PreTrainedTokenizerBase

import megakv
from megakv.launcher.process import orderly_end, quiet_libraries

RESULTS_DIR = Path(__file__).resolve().parent / "results"
HEADS_FILE = RESULTS_DIR / "heads.json"
IMPORTANCE_FILE = RESULTS_DIR / "head_importance.json"
BUDGETS = (0.02, 0.05, 0.1, 0.25, 0.5)
METHODS = ("streaming_llm", "snapkv", "pyramidkv", "h2o", "ada_snapkv", "headkv")
WITH_PEAK = ("snapkv", "pyramidkv", "ada_snapkv", "headkv")
PEAK: dict[str, Any] = {"observe": "prompt", "reduce": "peak"}
FULL = "every token"
ANSWER_TOKENS = 8
RIVALS = tuple((f"ada_snapkv{suffix}", f"snapkv{suffix}") for suffix in ("", ", peak"))
"""Unequal budgets and equal ones of the same total, which are compared document by document."""
CLOSE, SCARCE = RIVALS[1], (0.02, 0.05)
"""Those that hardly differ, and the budgets at which some document tells them apart: more documents are asked there."""
Z = 1.96
"""Of a 95% interval."""


@dataclass(frozen=True)
class Setting:
    """One line of the table.

    Parameters
    ----------
    label : str
        What it is called.
    section : dict or None
        ``megakv.fairkv`` but for the budget; None keeps every token.
    """

    label: str
    section: dict[str, Any] | None


def settings() -> list[Setting]:
    """All lines: every method as its paper has it, and those that can with the peak over the whole prompt."""
    lines = [Setting(FULL, None)]
    for peak in (False, True):
        for method in WITH_PEAK if peak else METHODS:
            section: dict[str, Any] = {"method": method, **(PEAK if peak else {})}
            if method == "headkv":
                section["importance"] = str(IMPORTANCE_FILE)
            lines.append(Setting(method + (", peak" if peak else ""), section))
    return lines


def write_importance() -> None:
    """The importance of KV heads for HeadKV: the share of their attention on the digit that is said next."""
    shares = np.array(json.loads(HEADS_FILE.read_text())["next_digit"])
    table = shares.reshape(len(shares), -1, 2).mean(-1)
    IMPORTANCE_FILE.write_text(json.dumps({"model": "passkey", "importance": np.round(table, 4).tolist()}) + "\n")


def answers(section: dict[str, Any] | None, documents: list[Document]) -> dict[str, Any]:
    """Read each document, compress, then ask.

    Returns
    -------
    dict
        ``exact`` answers of so many ``documents``, ``right`` with 1 or 0 for each, and the share of the cache's
        ``bytes`` that was held when the question came.
    """
    tokenizer: PreTrainedTokenizerBase = load_tokenizer()
    asked = tokenizer(SEPARATOR + question(), return_tensors="pt").input_ids
    extra = {} if section is None else {"fairkv": section}
    engine = megakv.init_inference(str(MODEL_DIR), {"dtype": "fp32", "megakv": extra})
    config = engine.module.config
    token_bytes = 2 * 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    right: list[int] = []
    held = 0.0
    for each in documents:
        session = engine.session()
        session.generate(torch.tensor([each.ids]), max_new_tokens=1, do_sample=False)
        # Without the token that was generated behind the document.
        session.cut_back(session.length)
        held += session._cache.nbytes() / (token_bytes * len(each.ids))
        before = len(each.ids) + asked.shape[1]
        found = session.generate(asked, max_new_tokens=ANSWER_TOKENS, do_sample=False)
        right.append(int(is_correct(tokenizer.decode(found[0, before:], skip_special_tokens=True), each.number)))
        session.close()
    engine.destroy()
    return {"documents": len(documents), "exact": sum(right), "right": right, "bytes": held / len(documents)}


def compare(record: dict[str, Any]) -> list[dict[str, Any]]:
    """Unequal budgets against equal ones, over pairs of answers to one document.

    Their difference in percent with its 95% interval (Bonett and Price 2012, which also says something where all pairs
    agree), and McNemar's exact p-value.
    """
    cells = {(cell["label"], cell["budget"]): cell for cell in record["cells"]}
    found = []
    for rivals in RIVALS:
        for budget in BUDGETS:
            pair = [cells.get((label, budget), {}).get("right") for label in rivals]
            if None in pair:
                continue
            difference = np.array(pair[0]) - np.array(pair[1])
            won, lost = int((difference > 0).sum()), int((difference < 0).sum())
            up, down = ((count + 1) / (len(difference) + 2) for count in (won, lost))
            reach = Z * math.sqrt((up + down - (up - down) ** 2) / (len(difference) + 2))
            tail = sum(math.comb(won + lost, k) for k in range(min(won, lost) + 1)) / 2 ** (won + lost)
            found.append(
                {"label": rivals[0], "against": rivals[1], "budget": budget, "documents": len(difference),
                 "difference": 100 * float(difference.mean()), "low": 100 * (up - down - reach),
                 "high": 100 * (up - down + reach), "won": won, "lost": lost, "p": min(1.0, 2 * tail)}
            )  # fmt: skip
    return found


def make_documents(tokens: int, count: int, seed: int) -> list[Document]:
    """Documents whose numbers lie at evenly spread depths."""
    tokenizer, rng = load_tokenizer(), np.random.default_rng(seed)
    return [document(tokens, (index + 0.5) / count, rng, tokenizer) for index in range(count)]


def table(record: dict[str, Any]) -> str:
    """The results as Markdown."""
    cells = {(cell["label"], cell["budget"]): cell for cell in record["cells"]}
    heads = [f"{budget:.0%}" for budget in BUDGETS]
    close, scarce = " and ".join(f"`{label}`" for label in CLOSE), " and ".join(f"{budget:.0%}" for budget in SCARCE)
    lines = [
        f"Exact answers in percent, of {record['prompts']} documents ({record['pairs']} for {close} at {scarce}), by "
        f"the share of a {record['tokens']}-token document's keys and values that is kept; the question comes after "
        "compression:",
        "",
        "| method | " + " | ".join(heads) + " |",
        "|---|" + "---:|" * len(heads),
    ]
    for setting in settings():
        row = [cells.get((setting.label, None if setting.section is None else budget)) for budget in BUDGETS]
        shown = ["-" if cell is None else f"{100 * cell['exact'] / cell['documents']:.0f}" for cell in row]
        lines.append(f"| {setting.label} | " + " | ".join(shown) + " |")
    if record.get("comparisons"):
        lines += [
            "",
            "Unequal against equal budgets, document by document: difference in percent with its 95% interval, "
            "documents won and lost, and McNemar's exact p:",
            "",
            "| method | budget | documents | difference | won, lost | p |",
            "|---|---:|---:|---:|---:|---:|",
        ]
        lines += [
            f"| {each['label']} | {each['budget']:.0%} | {each['documents']} | {each['difference']:.1f} "
            f"[{each['low']:.1f}, {each['high']:.1f}] | {each['won']}, {each['lost']} | {each['p']:.2g} |"
            for each in record["comparisons"]
        ]
    return "\n".join(lines) + "\n"


def draw(record: dict[str, Any], path: Path) -> None:
    """Accuracy by budget, a line per method."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for index, setting in enumerate(settings()):
        found = sorted(
            (cell["budget"] or 1.0, 100 * cell["exact"] / cell["documents"])
            for cell in record["cells"]
            if cell["label"] == setting.label
        )
        if setting.section is None:
            for _, value in found:
                axes.axhline(value, color="grey", lw=0.8, label=setting.label)
        else:
            style = "-" if "peak" in setting.label else "--"
            color = f"C{METHODS.index(setting.section['method'])}"
            shift = 1 + 0.012 * (index - 5)
            axes.plot([x * shift for x, _ in found], [y for _, y in found], style, marker="o", ms=4, color=color,
                      label=setting.label)  # fmt: skip
    axes.set(xscale="log", ylim=(-3, 103), xlabel="share of keys and values kept", ylabel="exact answers, percent")
    axes.set_xticks(BUDGETS, [f"{budget:.0%}" for budget in BUDGETS])
    axes.minorticks_off()
    axes.set_title(f"Question after compression, {record['tokens']} tokens, {record['prompts']} documents or more")
    axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Measure from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS_DIR, help="folder for the results")
    parser.add_argument("--tokens", type=int, default=2048, help="length of the documents")
    parser.add_argument("--prompts", type=int, default=40, help="documents for every method and budget")
    parser.add_argument("--pairs", type=int, default=200, help="the same where equal and unequal budgets hardly differ")
    parser.add_argument("--seed", type=int, default=99, help="seed of the documents")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--fresh", action="store_true", help="measure everything anew")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    quiet_libraries()
    write_importance()
    path = args.output / "compression.json"
    sizes = {"tokens": args.tokens, "prompts": args.prompts, "pairs": args.pairs, "seed": args.seed}
    record: dict[str, Any] = {**sizes, "cells": []}
    if path.exists() and not args.fresh:
        earlier = json.loads(path.read_text())
        if {name: earlier.get(name) for name in sizes} == sizes:
            record = earlier
    done = {(cell["label"], cell["budget"]) for cell in record["cells"]}
    documents, many = (make_documents(args.tokens, count, args.seed) for count in (args.prompts, args.pairs))
    for setting in settings():
        for budget in [None] if setting.section is None else BUDGETS:
            if (setting.label, budget) in done:
                continue
            section = None if setting.section is None else {**setting.section, "budget": budget}
            asked = many if setting.label in CLOSE and budget in SCARCE else documents
            cell = {"label": setting.label, "budget": budget, **answers(section, asked)}
            record["cells"].append(cell)
            path.write_text(json.dumps(record, indent=1) + "\n")
            print(f"{setting.label}, budget {budget}: {cell['exact']} of {len(asked)}", flush=True)
    record["comparisons"] = compare(record)
    path.write_text(json.dumps(record, indent=1) + "\n")
    (args.output / "compression.md").write_text(table(record))
    draw(record, args.output / "compression.png")
    print(table(record))


if __name__ == "__main__":
    with orderly_end():
        main()
