"""Started on every rank: prompts that are compressed in pieces, and rows of a batch beside the same rows alone.

Usage: fairkv_chunks.py OUT.json WORK_DIR MESHES CASES [full], as in fairkv.py; ``full`` has short chunks on all.
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
from fairkv import compress_by, config_of, ids_of, kept_slots
from families import llama
from mappings import random_mapping
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

import megakv
from megakv.distributed.mesh import start_distributed
from megakv.launcher.process import orderly_end, quiet_libraries
from tests.distributed.compression_cases import CASES, SPREAD

TURNS = ([102, 40, 63, 3, 71], [72, 21, 64, 68, 0])
"""New tokens of each row; a row is compressed from 64 on, whatever the others have."""
CHUNKS = (51, 40)
"""Parts that divide the prompt and parts that do not."""
GREEDY: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}


def turn_inputs(lengths: list[int], seed: int) -> tuple[Tensor, Tensor]:
    """Random tokens behind padding."""
    width = max(lengths)
    mask = torch.stack([torch.arange(width) >= width - length for length in lengths]).long()
    return ids_of(width, len(lengths), seed) * mask, mask


def converse(engine: Any, rows: list[int], chunk: int | None) -> dict[str, Any]:
    """Two turns of some rows: their answers, and what each keeps, by the number of the token in its row."""
    session = engine.session()
    answers: list[list[list[int]]] = []
    for seed, lengths in enumerate(TURNS):
        ids, mask = (tensor[rows] for tensor in turn_inputs(lengths, seed))
        first = int(mask.any(0).long().argmax()) if mask.any() else ids.shape[1] - 1
        # A row alone has no padding, and an empty turn one token of it.
        ids, mask = ids[:, first:], mask[:, first:]
        options = GREEDY if chunk is None else {**GREEDY, "prefill_chunk_size": chunk}
        before = session.input_ids.shape[1] if seed else 0
        found = session.generate(ids, mask, **options)[:, before + ids.shape[1] :]
        answers.append(found.tolist())
    cache = session._cache
    kept = kept_slots(engine, cache)
    real = session.attention_mask.cumsum(1) - 1
    ordinals = [[[real[row, heads].tolist() for heads in layer[row]] for layer in kept] for row in range(len(rows))]
    held = engine._comm.gather_objects([cache.store(0).kept(row).tolist() for row in range(len(rows))])
    return {
        "answers": [[turn[row] for turn in answers] for row in range(len(rows))],
        "kept": ordinals,
        "ranges": [len(ranges) for ranges in cache.compressed],
        "held": [sum(sum(rank[row]) for rank in held) for row in range(len(rows))],
    }


def chunks_of(mesh: str, name: str, *, full: bool) -> list[int]:
    """Also parts that are shorter than the window and than CP cuts, of which a prompt has many.

    Five tokens for one method of each way to observe on one rank, if `full` on every mesh; else on others for some:
    what a piece means for a rank's part of a sequence is seen on 2x1 and in the chain, for its heads where they are
    mapped. One token for one method.
    """
    chunks = list(CHUNKS)
    short = {"1x1": (*SPREAD, "h2o"), "2x1": ("ada_snapkv", "h2o"), "1x2:mapped": ("ada_snapkv_peak",)}
    if name in ((*SPREAD, "h2o") if full else short.get(mesh, ())):
        chunks.append(5)
    if name == "ada_snapkv" and (mesh == "2x1:last" or full and mesh != "1x1"):
        chunks.append(1)
    return chunks


def main() -> None:
    """Entry of every rank."""
    out, work, meshes = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split(",")
    torch.set_num_threads(1)
    quiet_libraries()
    disable_progress_bar()
    start_distributed(tp_only=False, timeout_s=60)
    folder, importance, mapping = work / "model", work / "importance.json", work / "mapping.json"
    if dist.get_rank() == 0 and not folder.exists():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(llama(initializer_range=0.3), dtype=torch.float32).save_pretrained(folder)
        layers = llama().num_hidden_layers
        importance.write_text(json.dumps({"budgets": torch.rand(layers, 4).tolist()}))
    if dist.get_rank() == 0 and ("mapped" in sys.argv[3] or "batched" in sys.argv[3]):
        random_mapping(llama().num_hidden_layers, 4, dist.get_world_size()).save(mapping)
    dist.barrier()
    results: dict[str, Any] = {}
    for mesh in meshes:
        engine = megakv.init_inference(str(folder), config_of(mesh, CASES["ada_snapkv"], mapping))
        for name in sys.argv[4].split(","):
            settings = CASES[name]
            if (":" in mesh and name not in SPREAD) or (mesh != "1x1" and name not in (*SPREAD, "h2o")):
                continue
            section = {"min_tokens": 64, **settings}
            if name == "headkv":
                section["importance"] = str(importance)
            compress_by(engine, section)
            rows = list(range(len(TURNS[0])))
            results[f"{mesh} {name} whole"] = converse(engine, rows, None)
            if mesh == "1x1":
                alone = [converse(engine, [row], None) for row in rows if TURNS[1][row]]
                results[f"{mesh} {name} alone"] = {
                    key: [each[key][0] for each in alone] for key in ("answers", "kept", "ranges", "held")
                }
            for chunk in chunks_of(mesh, name, full="full" in sys.argv[5:]):
                results[f"{mesh} {name} {chunk}"] = converse(engine, rows, chunk)
        engine.destroy()
    if dist.get_rank() == 0:
        out.write_text(json.dumps(results))


if __name__ == "__main__":
    with orderly_end():
        main()
