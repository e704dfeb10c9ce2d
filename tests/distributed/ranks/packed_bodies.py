"""Started on every rank: caches that are compressed and lie off the accelerator in few bits.

Usage: packed_bodies.py OUT.json WORK_DIR MESHES, meshes as CPxTP:METHOD separated by commas. What one rank finds stays
in WORK_DIR: other meshes are compared with it, and each goes on with the session that the one before has saved.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from fairkv import OFFLOAD, ids_of
from families import llama
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

import megakv
from megakv.distributed.mesh import start_distributed
from megakv.launcher.process import orderly_end, quiet_libraries

CASES: dict[str, tuple[int | None, dict[str, Any]]] = {
    "exact prompts": (None, {"method": "ada_snapkv", "budget": 0.3, "window": 8, "min_tokens": 24}),
    "prompts": (4, {"method": "ada_snapkv", "budget": 0.3, "window": 8, "min_tokens": 24}),
    "evicted": (8, {"method": "streaming_llm", "budget": 24, "decode_interval": 7, "min_tokens": 24}),
}
"""Bits, and what is kept."""
Held = dict[tuple[int, int, int, int], Tensor]
"""Key and value of a token, by layer, sequence, KV head and slot."""


def logits_of(engine: Any) -> Tensor:
    """Of the last token, pass by pass, for given tokens."""
    cache, found = None, []
    for seed, length in enumerate((90, *[1] * 8, 31, *[1] * 8)):
        made = engine(ids_of(length, 2, seed), past_key_values=cache)
        cache = made.past_key_values
        found.append(made.logits[:, -1])
    return torch.stack(found)


def held(engine: Any, cache: Any) -> Held:
    """All tokens of all ranks."""
    own: Held = {}
    heads = llama().num_key_value_heads // engine.mesh.tp_size * engine.mesh.tp_rank
    for layer in range(len(cache)):
        for sequence in range(cache.table.batch):
            slots = cache.table.slots(cache.rank, sequence)
            for head, keys, values, rows in cache.store(layer).pieces(sequence):
                places = ((layer, sequence, heads + head, slot) for slot in slots[rows].tolist())
                own |= dict(zip(places, torch.cat([keys, values], dim=1), strict=True))
    found: Held = {}
    for each in engine._comm.gather_objects(own):
        found |= each
    return found


def main() -> None:
    """Entry of every rank."""
    out, work, meshes = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split(",")
    torch.set_num_threads(1)
    quiet_libraries()
    disable_progress_bar()
    start_distributed(tp_only=False, timeout_s=60)
    folder, leads = work / "model", dist.get_rank() == 0
    if leads and not folder.exists():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(llama(initializer_range=0.3), dtype=torch.float32).save_pretrained(folder)
    dist.barrier()
    results: dict[str, Any] = {}
    for mesh in meshes:
        shape, _, method = mesh.partition(":")
        cp, tp = (int(part) for part in shape.split("x"))
        for case, (bits, fairkv) in CASES.items():
            alone, saved = work / f"{case}.pt", work / case
            if bits is None and alone.exists():
                continue
            offload = {**OFFLOAD, "method": method, "kv_bits": bits, "kv_group": 4}
            section = {"context_parallel": {"size": cp}, "fairkv": fairkv, "offload": offload}
            config = {"dtype": "fp32", "tensor_parallel": {"tp_size": tp}, "megakv": section}
            engine = megakv.init_inference(str(folder), config)
            logits = logits_of(engine)
            hosted = max(step.kept_on_host for step in engine._offloader.steps)
            if not alone.exists():
                session = engine.session()
                session.generate(ids_of(80, 2, 5), max_new_tokens=9, min_new_tokens=9, do_sample=False, pad_token_id=0)
                torch.save({"logits": logits, "held": held(engine, session._cache)}, alone)
            else:
                session = engine.restore_session(saved)
            expected, now = torch.load(alone, weights_only=True), held(engine, session._cache)
            dist.barrier()
            session.save(saved)
            results[f"{mesh} {case}"] = {
                "error": (logits - expected["logits"]).abs().max().item(),
                "restored": now.keys() == expected["held"].keys()
                and all(torch.equal(both, expected["held"][at]) for at, both in now.items()),
                "tokens": len(now),
                "hosted": hosted,
            }
            engine.destroy()
    if any("exact" in name for name in results):
        both = [torch.load(work / f"{case}.pt", weights_only=True)["logits"] for case in ("exact prompts", "prompts")]
        results["rounding"] = (both[0] - both[1]).abs().max().item()
    if leads:
        out.write_text(json.dumps(results))


if __name__ == "__main__":
    with orderly_end():
        main()
