"""Measure how evenly mapped KV heads load the ranks on documents that the mapper has not seen.

Usage: ``python recipes/passkey/balance.py``. Half of the documents make the profile; the other half is what counts.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from compression import PEAK, RESULTS_DIR, make_documents
from task import MODEL_DIR

import megakv
from megakv.cache.layer import LayerMapping, contiguous_layer
from megakv.cache.splitting import slowest_loads
from megakv.fairkv.mapper import map_heads
from megakv.fairkv.profile import BudgetProfile, MeasuredPrompt, make_profile
from megakv.launcher.budget_ranks import measure
from megakv.launcher.process import quiet_libraries
from megakv.launcher.prompts import Prompt

CELLS = ((2, 0), (2, 1), (4, 0), (4, 1), (4, 3), (4, 8))
"""Tensor-parallel ranks and copies."""
SECTIONS: dict[str, dict[str, Any]] = {"ada_snapkv": {}, "ada_snapkv, peak": PEAK}

Budgets = npt.NDArray[np.float64]


def measured(section: dict[str, Any], tokens: int, count: int, seed: int) -> list[MeasuredPrompt]:
    """What compression keeps of every document."""
    engine = megakv.init_inference(str(MODEL_DIR), {"dtype": "fp32", "megakv": {"fairkv": section}})
    documents = make_documents(tokens, count, seed)
    found = measure(engine, [(Prompt("documents", "", ""), torch.tensor([each.ids])) for each in documents])
    engine.destroy()
    return found


def utilisation(layers: list[LayerMapping], documents: Budgets, tp_size: int) -> float:
    """Mean load over the slowest rank's, over layers and documents ``[N, layers, K]``, each with its own split."""
    slowest = [slowest_loads(layer.ranks, documents[:, n], tp_size) for n, layer in enumerate(layers)]
    return float(np.mean(documents.sum(2).T / tp_size / np.stack(slowest)))


def cell(profile: BudgetProfile, others: Budgets, tp_size: int, copies: int) -> dict[str, Any]:
    """One line of the table."""
    found = map_heads(profile, tp_size=tp_size, copies=copies)
    plain = [contiguous_layer(profile.n_kv_heads, tp_size)] * profile.n_layers
    return {
        "tp": tp_size,
        "copies": copies,
        "contiguous": utilisation(plain, others, tp_size),
        "mapped": utilisation(found.layers, others, tp_size),
        "profile": found.barrier_utilisation,
    }


def table(record: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [
        f"Utilisation on {record['prompts'] // 2} documents of {record['tokens']} tokens, of which the model keeps "
        f"{record['budget']:.0%}, mapped by {record['prompts'] - record['prompts'] // 2} others:",
        "",
        "| method | ranks, copies | contiguous | mapped | mapped, on its own profile |",
        "|---|---|---:|---:|---:|",
    ]
    for name, cells in record["cells"].items():
        lines += [
            f"| {name} | {each['tp']}, {each['copies']} | {each['contiguous']:.3f} | {each['mapped']:.3f} | "
            f"{each['profile']:.3f} |"
            for each in cells
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS_DIR, help="folder for the results")
    parser.add_argument("--tokens", type=int, default=2048, help="length of the documents")
    parser.add_argument("--prompts", type=int, default=28, help="documents, every other one for the profile")
    parser.add_argument("--budget", type=float, default=0.25, help="share of keys and values that is kept")
    parser.add_argument("--seed", type=int, default=77, help="seed of the documents")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    quiet_libraries()
    record: dict[str, Any] = {name: getattr(args, name) for name in ("tokens", "prompts", "budget", "seed")}
    record["cells"] = {}
    for name, extra in SECTIONS.items():
        prompts = measured({"budget": args.budget, **extra}, args.tokens, args.prompts, args.seed)
        profile = make_profile("passkey", "ada_snapkv", prompts[::2])
        others = np.array([each.budgets for each in prompts[1::2]])
        record["cells"][name] = [cell(profile, others, *pair) for pair in CELLS]
    (args.output / "balance.json").write_text(json.dumps(record, indent=1) + "\n")
    (args.output / "balance.md").write_text(table(record))
    print(table(record))


if __name__ == "__main__":
    main()
