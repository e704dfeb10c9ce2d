"""Writes questions of RULER's tasks, as lm-eval generates them without a download: see ruler.sh, which runs this."""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np

SEED = 42
NIAH: dict[str, tuple[str, str, str, dict[str, int]]] = {
    "niah_single_1": ("repeat", "words", "numbers", {}),
    "niah_multikey_2": ("needle", "words", "numbers", {}),
    "niah_multikey_3": ("needle", "uuids", "uuids", {}),
    "noise_multikey": ("repeat", "words", "numbers", {"num_needle_k": 4}),
    "noise_multivalue": ("repeat", "words", "numbers", {"num_needle_v": 4}),
    "noise_multiquery": ("repeat", "words", "numbers", {"num_needle_q": 4}),
}
"""Haystack, keys and values of the needles, and how many of what. The last three are RULER's niah_multikey_1,
niah_multivalue and niah_multiquery with the haystack of niah_single_1, where RULER has essays from the web."""


def tasks(tokenizer: Any, count: int) -> dict[str, Callable[[int], list[dict[str, Any]]]]:
    """By name, what generates so many items whose prompts and answers have up to so many tokens."""
    from lm_eval.tasks.ruler import cwe_utils, fwe_utils, niah_utils, prepare_niah, vt_utils

    def needles(haystack: str, keys: str, values: str, counts: dict[str, int]) -> Callable[[int], Any]:
        return lambda length: prepare_niah.generate_samples(
            prepare_niah.get_haystack(type_haystack=haystack), max_seq_length=length, template=niah_utils.TEMPLATE,
            type_haystack=haystack, type_needle_k=keys, type_needle_v=values, num_samples=count, TOKENIZER=tokenizer,
            **counts,
        )  # fmt: skip

    def variables(length: int) -> list[dict[str, Any]]:
        made = vt_utils.sys_vartrack_w_noise_random
        example = made(tokenizer=tokenizer, num_samples=1, max_seq_length=500, incremental=5)[0]
        return made(tokenizer=tokenizer, num_samples=count, max_seq_length=length, icl_example=example)

    sized = {"tokenizer": tokenizer, "num_samples": count}
    return {name: needles(*words) for name, words in NIAH.items()} | {
        "vt": variables,
        "cwe": lambda length: cwe_utils.sys_word_pair_random(max_seq_length=length, **sized),
        "fwe": lambda length: fwe_utils.sys_kwext(max_seq_length=length, **sized),
    }


def main() -> None:
    """Entry of the script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="directory of the model, for its tokenizer")
    parser.add_argument("--context", default="4096,8192", help="tokens of prompt and answer (default 4096,8192)")
    parser.add_argument("--items", type=int, default=32, help="of each task and length (default 32)")
    parser.add_argument("--json", type=Path, required=True, help="file to write")
    arguments = parser.parse_args()
    # lm-eval's module fetches a sentence splitter when it is imported, unless NLTK has one. Only haystacks of essays,
    # which are not made here, are split: an empty folder will do.
    data = Path(sys.prefix) / "nltk_data"
    (data / "tokenizers" / "punkt_tab").mkdir(parents=True, exist_ok=True)
    os.environ["NLTK_DATA"] = str(data)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    found: list[dict[str, Any]] = []
    for context in map(int, arguments.context.split(",")):
        for task, generate in tasks(tokenizer, arguments.items).items():
            random.seed(SEED)
            np.random.seed(SEED)
            # It prints at every step, and shows a bar for each task.
            with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
                items = generate(context)
            print(f"{task}, {context} tokens", flush=True)
            found += [
                {"task": task, "context": context, "text": f"{item['input']} {item['gen_prefix']}",
                 "expected": list(item["outputs"])}
                for item in items
            ]  # fmt: skip
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    fresh = arguments.json.with_name(arguments.json.name + ".new")
    fresh.write_text(json.dumps(found, indent=1) + "\n")
    fresh.replace(arguments.json)
    print(f"{len(found)} items: {arguments.json.resolve()}")


if __name__ == "__main__":
    main()
