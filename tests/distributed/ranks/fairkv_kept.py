"""Started on every rank: the tokens that methods keep of prompts.

Usage: fairkv_kept.py MODEL PROMPTS.json SECTIONS.json OUT.json, sections being ``megakv.fairkv`` by name.
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
    folder, prompts, sections, out = sys.argv[1:]
    torch.set_num_threads(1)
    quiet_libraries()
    asked = json.loads(Path(prompts).read_text())
    results: list[dict[str, object]] = [{} for _ in asked]
    for name, section in json.loads(Path(sections).read_text()).items():
        engine = megakv.init_inference(folder, {"dtype": "fp32", "megakv": {"fairkv": section}})
        for result, prompt in zip(results, asked, strict=True):
            cache = engine(torch.tensor([prompt])).past_key_values
            result[name] = [layer[0] for layer in kept_slots(engine, cache)]
        engine.destroy()
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    with orderly_end():
        main()
