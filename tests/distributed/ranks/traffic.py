"""Started on every rank: what each method puts on the wire, by operation and layer.

Usage: traffic.py OUT.json CPxTP.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from families import llama
from transformers import AutoModelForCausalLM

import megakv
from megakv.launcher.process import orderly_end, quiet_libraries

METHODS = [
    ("pass_kv", "replicated"),
    ("pass_q", "pass_q"),
    ("all_gather", "replicated"),
    ("tsp", "replicated"),
    ("tsp_causal", "replicated"),
]
TURNS = [(203, 1), (50, 3)]


def main() -> None:
    """Entry of every rank."""
    out, mesh = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    quiet_libraries()
    cp, tp = (int(part) for part in mesh.split("x"))
    rows = []
    for prefill, decode in METHODS:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(llama(), dtype=torch.float32)
        config = {
            "dtype": "fp32",
            "tensor_parallel": {"tp_size": tp},
            "megakv": {"context_parallel": {"size": cp, "prefill": prefill, "decode": decode}},
        }
        engine = megakv.init_inference(model, config)
        session = engine.session()
        for turn, (length, new) in enumerate(TURNS):
            ids = torch.randint(3, 120, (1, length), generator=torch.Generator().manual_seed(turn))
            cached = session.length
            session.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0)
            given = session.input_ids
            assert given is not None
            report = engine.report()
            rows.append(
                {
                    "prefill": prefill,
                    "decode": decode,
                    "cached": cached,
                    # The token generated last in the turn before is computed in this one.
                    "new": given.shape[1] - new - cached,
                    "decoded": new - 1,
                    "ranks": [[asdict(traffic) for traffic in rank.traffic] for rank in report.ranks],
                }
            )
        engine.destroy()
    if engine.mesh.rank == 0:
        out.write_text(json.dumps(rows))


if __name__ == "__main__":
    with orderly_end():
        main()
