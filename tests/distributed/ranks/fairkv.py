"""Started on every rank: compressed caches against dense attention under a mask of what was kept.

Usage: fairkv.py OUT.json WORK_DIR MESHES STEPS CASES FAMILIES [BATCHES], meshes as CPxTP or CPxTP:PREFILL, separated by
commas as are the CASES of compression_cases.py and FAMILIES, whose caches are kept whole; STEPS further tokens. PREFILL
is a method, or ``last``: the chain whose last rank keeps all, or ``mapped``: any method, with heads and copies of heads
on random ranks, or ``batched``: the same, but copies divide the batch, or ``offloaded``. BATCHES are by default all of
`LENGTHS`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import torch.distributed as dist
from families import FAMILIES, llama
from mappings import random_mapping
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

import megakv
from megakv.distributed.mesh import start_distributed
from megakv.fairkv.compression import Compressor
from megakv.fairkv.config import FairKVConfig
from megakv.launcher.process import orderly_end, quiet_libraries
from tests.distributed.compression_cases import CASES, SPREAD, WHOLE_CUT

LENGTHS = {1: [171], 5: [171, 40, 163, 3, 101]}
QUESTION, SECOND = 21, 90
OFFLOAD = {"enabled": True, "host_gb": 0.05, "page_kib": 8, "chunk_tokens": 16, "emulated_link_gb_s": 0.02}
Kept = list[list[list[list[int]]]]
"""``[layer][sequence][KV head]`` slots."""


def config_of(mesh: str, fairkv: dict[str, Any], mapping: Path) -> dict[str, Any]:
    """The JSON of an engine; `mapping` is used where the mesh says so. It may be ``offloaded+mapped``."""
    shape, _, prefill = mesh.partition(":")
    cp, tp = (int(part) for part in shape.split("x"))
    section: dict[str, Any] = {"context_parallel": {"size": cp}, "fairkv": fairkv}
    kinds = prefill.split("+")
    if {"mapped", "batched"} & {*kinds}:
        copies = "batch" if "batched" in kinds else "tokens"
        section["fairkv"] = {**fairkv, "mapping": str(mapping), "copies": copies}
    if "offloaded" in kinds:
        section["offload"] = OFFLOAD
    if prefill and not {"mapped", "batched", "offloaded"} & {*kinds}:
        section["context_parallel"]["prefill"] = "runahead" if prefill == "last" else prefill
    if prefill == "last":
        section["runahead"] = {"kv": "last", "chunk_tokens": 7}
    return {"dtype": "fp32", "tensor_parallel": {"tp_size": tp}, "megakv": section}


def compress_by(engine: Any, section: dict[str, Any]) -> None:
    """Let an engine, which takes long to start, compress by other settings."""
    runtime = engine._runtime
    heads = runtime.compressor._heads
    runtime.compressor = Compressor(FairKVConfig(**section), heads, engine._comm, runtime.replicas)


def ids_of(length: int, batch: int, seed: int) -> Tensor:
    """``[B, S]`` random tokens, the same on every rank."""
    return torch.randint(3, 120, (batch, length), generator=torch.Generator().manual_seed(seed))


def kept_slots(engine: Any, cache: Any) -> Kept:
    """Slots of every compressed token, over all ranks."""
    shards = engine._runtime.compressor._heads
    own = []
    for layer in range(len(cache)):
        heads = shards.shard(layer, engine.mesh.tp_rank).kv_heads
        for sequence in range(cache.table.batch):
            slots = cache.table.slots(cache.rank, sequence)
            for body in cache.store(layer).bodies(sequence):
                for index, head in enumerate(heads):
                    rows = [rows for _, rows in body.index.pieces(index)]
                    if rows:
                        own.append((layer, sequence, head, slots[np.concatenate(rows)].tolist()))
    count = engine.module.config.num_key_value_heads
    result: Kept = [[[[] for _ in range(count)] for _ in range(cache.table.batch)] for _ in range(len(cache))]
    with engine.agreement.call():
        everyone = engine._comm.gather_objects(own)
    for found in everyone:
        for layer, sequence, head, slots in found:
            result[layer][sequence][head] = sorted({*result[layer][sequence][head], *slots})
    return result


def begin(folder: Path) -> None:
    """Join the other ranks; rank 0 writes a small model to a folder that is not there yet."""
    torch.set_num_threads(1)
    quiet_libraries()
    disable_progress_bar()
    start_distributed(tp_only=False, timeout_s=60)
    if dist.get_rank() == 0 and not folder.exists():
        torch.manual_seed(0)
        # Weights this large make attention sharp, so that scores differ by far more than the rounding of other meshes.
        AutoModelForCausalLM.from_config(llama(initializer_range=0.3), dtype=torch.float32).save_pretrained(folder)
    dist.barrier()


def in_float64(folder: Path) -> PreTrainedModel:
    """The model that `begin` has written, whose attention shows its weights."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()


def written_mapping(path: Path, tp_size: int) -> None:
    """Rank 0 writes a random placement of the model's heads to a file that is not there yet."""
    if dist.get_rank() == 0 and not path.exists():
        random_mapping(llama().num_hidden_layers, 4, tp_size).save(path)
    dist.barrier()


def mapping_for(mesh: str, work: Path) -> Path:
    """That of a mesh, if its heads are placed by one."""
    path = work / f"mapping-{mesh.replace(':', '-')}.json"
    if mesh.endswith(("mapped", "batched")):
        written_mapping(path, int(mesh.partition(":")[0].split("x")[1]))
    return path


def reference(plain: PreTrainedModel, ids: Tensor, masks: Tensor) -> tuple[Tensor, list[Tensor]]:
    """``[S, V]`` logits of one sequence in float64, and by layer its attention weights ``[H, S, S]``.

    Masks ``[layer, KV head, S, S]`` say what queries see.
    """
    group = plain.config.num_attention_heads // plain.config.num_key_value_heads
    handles = []
    for layer, block in enumerate(plain.model.layers):
        hidden = ~masks[layer].repeat_interleave(group, 0)[None]
        bias = torch.zeros(hidden.shape, dtype=torch.float64).masked_fill(hidden, -torch.inf)

        def swap(module: Any, args: Any, kwargs: Any, bias: Tensor = bias) -> Any:
            return args, {**kwargs, "attention_mask": bias}

        handles.append(block.self_attn.register_forward_pre_hook(swap, with_kwargs=True))
    with torch.no_grad():
        out = plain(ids[None], use_cache=False, output_attentions=True)
    for handle in handles:
        handle.remove()
    return out.logits[0], [weights[0] for weights in out.attentions]


def masks_of(kept: Kept, spans: list[tuple[int, int]], sequence: int, first: int, total: int) -> Tensor:
    """``[layer, KV head, S, S]`` what every query of a sequence saw, from its first real slot on.

    `spans` are the slots of its turns that were compressed: their own queries still saw all of them.
    """
    slots = torch.arange(first, total)
    causal = slots[None] <= slots[:, None]
    gone = torch.zeros_like(causal)
    for start, stop in spans:
        gone |= ((slots >= start) & (slots < stop))[None] & (slots >= stop)[:, None]
    result = []
    for layer in kept:
        heads = []
        for found in layer[sequence]:
            held = torch.zeros(total, dtype=torch.bool)
            held[torch.tensor(found, dtype=torch.long)] = True
            heads.append(causal & (~gone | held[slots][None]))
        result.append(torch.stack(heads))
    return torch.stack(result)


def watch_memory(engine: Any, rows: int) -> tuple[list[float], list[Any]]:
    """What is held after each layer of the passes to come over what is dense there, and the hooks that look.

    `rows` tokens, of all sequences together, are dense in a layer that was not compressed yet.
    """
    shares: list[float] = []

    def look(module: Any, args: Any, output: Any) -> None:
        stores = [engine._runtime.current.cache.store(layer) for layer in range(module.self_attn.layer_idx + 1)]
        attention = module.self_attn
        dense = rows * 4 * (attention.k_proj.weight.shape[0] + attention.v_proj.weight.shape[0])
        shares.append(sum(store.nbytes() for store in stores) / (dense * len(stores)))

    return shares, [layer.register_forward_hook(look) for layer in engine.module.model.layers]


def run_case(engine: Any, plain: PreTrainedModel, batch: int, steps: int) -> dict[str, Any]:
    """A padded prompt, a question, a second document, and further tokens one by one."""
    lengths = LENGTHS[batch]
    width = max(lengths)
    mask = torch.zeros(batch, width, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, width - length :] = 1
    passes = [width, QUESTION, SECOND] + [1] * steps
    # What is read does not depend on how many further tokens follow.
    ids = torch.cat([ids_of(length, batch, 7 + index) for index, length in enumerate(passes)], dim=1)
    cache, found, start = None, [], 0
    shares, hooks = watch_memory(engine, sum(lengths))
    whole = torch.cat([mask, torch.ones(batch, sum(passes) - width, dtype=torch.long)], dim=1)
    for length in passes:
        stop = start + length
        positions = (whole[:, :stop].cumsum(1) - 1).clamp(min=0)[:, start:]
        out = engine(ids[:, start:stop], attention_mask=whole[:, :stop], position_ids=positions, past_key_values=cache)
        cache = out.past_key_values
        found.append(out.logits)
        start = stop
        while hooks:
            hooks.pop().remove()
    kept = kept_slots(engine, cache)
    counts = [int(np.sum([len(head) for head in layer[row]])) for layer in kept for row in range(batch)]
    element = cache.store(0).bodies(0)[0].block.element_size() if cache.store(0).bodies(0) else 4
    width_bytes = 2 * (plain.config.hidden_size // plain.config.num_attention_heads) * element
    tokens = [int(np.sum(cache.store(layer).kept(row))) for layer in range(len(cache)) for row in range(batch)]
    held = engine._comm.gather_objects((cache.nbytes(), sum(tokens) * width_bytes))
    worst = 0.0
    if engine.mesh.rank == 0:
        logits = torch.cat(found, dim=1)
        for row, length in enumerate(lengths):
            first = width - length
            masks = masks_of(kept, cache.compressed[row], row, first, start)
            expected, _ = reference(plain, ids[row, first:], masks)
            difference = (logits[row, first:].double() - expected).abs().max() / expected.abs().max()
            worst = max(worst, float(difference))
    return {
        "kept": kept,
        "counts": counts,
        "error": worst,
        "held": max(shares),
        "bytes": [sum(counts) for counts in zip(*held, strict=True)],
    }


def whole_cache(family: str, mesh: str, mapping: Path) -> bool:
    """Whether a compressed cache that keeps every token gives the plain model's tokens."""
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32).eval())
    ids, mask = ids_of(60, 2, 3), torch.ones(2, 60, dtype=torch.long)
    mask[1, :20] = 0
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = models[0].generate(ids, **options)
    engine = megakv.init_inference(models[1], config_of(mesh, {"budget": 1, "min_tokens": 16}, mapping))
    found = engine.generate(ids, **options)
    held = engine.report().ranks[0].head_tokens
    engine.destroy()
    return torch.equal(found, expected) and len(held) == models[0].config.num_hidden_layers


def main() -> None:
    """Entry of every rank."""
    out, work, meshes, steps = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split(","), int(sys.argv[4])
    cases = {name: CASES[name] for name in sys.argv[5].split(",")}
    families = sys.argv[6].split(",")
    batches = [int(batch) for batch in sys.argv[7:]] or list(LENGTHS)
    folder, importance = work / "model", work / "importance.json"
    begin(folder)
    if dist.get_rank() == 0 and not importance.exists():
        layers = llama().num_hidden_layers
        importance.write_text(json.dumps({"budgets": np.random.default_rng(0).random((layers, 4)).tolist()}))
    dist.barrier()
    plain = in_float64(folder)
    results: dict[str, Any] = {}
    for mesh in meshes:
        mapping = mapping_for(mesh, work)
        engine = megakv.init_inference(str(folder), config_of(mesh, CASES["ada_snapkv"], mapping))
        for name, settings in cases.items():
            if ":" in mesh and name not in SPREAD and not (mesh == "1x4:mapped" and name == "h2o"):
                continue
            section = {"min_tokens": 64, **settings}
            if name == "headkv":
                section["importance"] = str(importance)
            compress_by(engine, section)
            for batch in batches:
                count = steps if name == "ada_snapkv" else 3
                results[f"{mesh} {name} {batch}"] = run_case(engine, plain, batch, count)
            if name == "snapkv":
                # No more tokens than the budget: kept whole, as beside a longer row.
                cache = engine(ids_of(40, 1, 0)).past_key_values
                results[f"{mesh} short"] = cache.compressed
        engine.destroy()
        cut = not mesh.partition(":")[0].endswith("x1")
        for family in (name for name in families if name in WHOLE_CUT or not cut):
            results[f"{mesh} whole {family}"] = whole_cache(family, mesh, mapping)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(results))


if __name__ == "__main__":
    with orderly_end():
        main()
