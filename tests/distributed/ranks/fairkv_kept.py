"""Started on every rank: the tokens that methods keep.

Usage: fairkv_kept.py MODEL CASES.json OUT.json, cases as of tests/oracles/kvpress_kept.py, with a `section`
``megakv.fairkv`` each.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from fairkv import kept_slots

import megakv
from megakv.launcher.process import orderly_end, quiet_libraries


def main() -> None:
    """Entry of every rank."""
    folder, cases, out = sys.argv[1:]
    torch.set_num_threads(1)
    quiet_libraries()
    results: dict[str, list[object]] = {}
    for name, case in json.loads(Path(cases).read_text()).items():
        engine = megakv.init_inference(folder, {"dtype": "fp32", "megakv": {"fairkv": case["section"]}})
        results[name] = []
        for prompt in case["prompts"]:
            cache, first = None, len(prompt) - case["steps"]
            for start, stop in [(0, first), *((at, at + 1) for at in range(first, len(prompt)))]:
                ids, positions = torch.tensor([prompt[start:stop]]), torch.arange(start, stop)[None]
                cache = engine(ids, position_ids=positions, past_key_values=cache).past_key_values
            results[name].append([layer[0] for layer in kept_slots(engine, cache)])
        engine.destroy()
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    with orderly_end():
        main()
