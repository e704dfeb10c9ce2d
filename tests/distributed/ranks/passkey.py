"""Started on every rank: conversations with the passkey model, a number in turn 1 that is asked for in turn 4.

Usage: passkey.py OUT.json CPxTP TOKENS CONVERSATIONS.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "recipes" / "passkey"))

import numpy as np
import torch
from task import MODEL_DIR, conversation, is_correct, load_tokenizer

import megakv
from megakv.launcher.process import orderly_end, quiet_libraries

ANSWER_TOKENS = 8


def main() -> None:
    """Entry of every rank."""
    out, mesh, tokens, count = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    quiet_libraries()
    cp, tp = (int(part) for part in mesh.split("x"))
    config = {"tensor_parallel": {"tp_size": tp}, "megakv": {"context_parallel": {"size": cp}}}
    engine = megakv.init_inference(str(MODEL_DIR), config)
    tokenizer = load_tokenizer()
    answers = []
    for seed in range(count):
        talk = conversation(tokens, np.random.default_rng(seed), tokenizer)
        session = engine.session()
        pending = ""
        for turn, asked in zip(talk.turns, talk.asks, strict=True):
            # A turn that asks nothing is read together with the next one.
            pending += turn
            if not asked:
                continue
            ids = tokenizer(pending, return_tensors="pt").input_ids
            before = 0 if session.input_ids is None else session.input_ids.shape[1]
            found = session.generate(ids, max_new_tokens=ANSWER_TOKENS, do_sample=False)
            text = tokenizer.decode(found[0, before + ids.shape[1] :], skip_special_tokens=True)
            answers.append([talk.number, text, is_correct(text, talk.number)])
            pending = ""
        session.close()
    if engine.mesh.rank == 0:
        out.write_text(json.dumps(answers))
    engine.destroy()


if __name__ == "__main__":
    with orderly_end():
        main()
