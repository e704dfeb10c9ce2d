"""Started on every rank: the number in a document, asked for after its cache was compressed.

Usage: fairkv_passkey.py OUT.json CPxTP TOKENS DOCUMENTS.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "recipes" / "passkey"))

import numpy as np
import torch
from prose import SEPARATOR
from task import MODEL_DIR, document, is_correct, load_tokenizer, question

import megakv
from megakv.launcher.process import orderly_end, quiet_libraries

PEAK = {"observe": "prompt", "reduce": "peak"}
SECTIONS: dict[str, dict[str, Any]] = {
    "ada_snapkv": {"method": "ada_snapkv", "budget": 0.25, **PEAK},
    "snapkv": {"method": "snapkv", "budget": 0.25, **PEAK},
    "streaming_llm": {"method": "streaming_llm", "budget": 0.25},
}
ANSWER_TOKENS = 8


def main() -> None:
    """Entry of every rank."""
    out, mesh, tokens, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    quiet_libraries()
    cp, tp = (int(part) for part in mesh.split("x"))
    tokenizer = load_tokenizer()
    asked = tokenizer(SEPARATOR + question(), return_tensors="pt").input_ids
    results = {}
    for name, section in SECTIONS.items():
        config = {"tensor_parallel": {"tp_size": tp}, "megakv": {"context_parallel": {"size": cp}, "fairkv": section}}
        engine = megakv.init_inference(str(MODEL_DIR), config)
        exact, shares = 0, []
        for seed in range(count):
            rng = np.random.default_rng(seed)
            text = document(tokens, (seed + 0.5) / count, rng, tokenizer)
            session = engine.session()
            session.generate(torch.tensor([text.ids]), max_new_tokens=1, do_sample=False)
            session.cut_back(session.length)
            report = engine.report()
            heads = sum(len(layer) for layer in report.ranks[0].head_tokens) * tp
            kept = sum(sum(map(sum, rank.head_tokens)) for rank in report.ranks)
            full = report.ranks[0].kv_bytes
            shares.append([kept / (heads * len(text.ids)), full / (sum(map(sum, report.ranks[0].head_tokens)) * 256)])
            before = len(text.ids) + asked.shape[1]
            found = session.generate(asked, max_new_tokens=ANSWER_TOKENS, do_sample=False)
            exact += is_correct(tokenizer.decode(found[0, before:], skip_special_tokens=True), text.number)
            session.close()
        engine.destroy()
        results[name] = {"exact": exact, "shares": shares}
    if int(engine.mesh.rank) == 0:
        out.write_text(json.dumps(results))


if __name__ == "__main__":
    with orderly_end():
        main()
