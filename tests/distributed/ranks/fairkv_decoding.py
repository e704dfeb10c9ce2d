"""Started on every rank: caches that are compressed again while decoding, against dense attention in float64.

Usage: fairkv_decoding.py OUT.json WORK_DIR MESHES CASES STEPS, as in fairkv.py; STEPS tokens are decoded.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np
import torch
import torch.distributed as dist
from fairkv import begin, compress_by, config_of, ids_of, in_float64, kept_slots, mapping_for, reference
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import megakv
from megakv.launcher.process import orderly_end
from tests.distributed.compression_cases import PEAK

BUDGET, INTERVAL, WINDOW = 24, 10, 8
BASE: dict[str, Any] = {"budget": BUDGET, "decode_interval": INTERVAL, "min_tokens": 64}
CASES: dict[str, dict[str, Any]] = {
    "streaming_llm": {"method": "streaming_llm"},
    "h2o": {"method": "h2o"},
    "snapkv": {"method": "snapkv", "window": WINDOW},
    "snapkv_long": {"method": "snapkv", "window": 2 * INTERVAL, "pool": 1},
    "snapkv_peak": {"method": "snapkv", "window": WINDOW, **PEAK},
    "ada_snapkv": {"method": "ada_snapkv", "window": WINDOW, "pool": 3},
    "pyramidkv": {"method": "pyramidkv", "window": WINDOW, "pool": 1},
}
CONVERSED = ("streaming_llm", "h2o", "ada_snapkv")
LENGTHS = [100, 3, 40, 70]
"""Of a batch: compressed, kept whole, compressed as it is more than may be held, compressed."""
QUESTION = 13
Sets = list[list[list[set[int]]]]
"""``[sequence][layer][KV head]`` slots."""


def streaming_logits(plain: PreTrainedModel, ids: Tensor, seen: Tensor) -> Tensor:
    """``[S, V]`` logits of one sequence where every query sees tokens at their places within the cache.

    As StreamingLLM is published: keys are cached before rotary, and rotated anew for each query. `seen` is ``[S, S]``.
    """
    model, config = plain.model, plain.config
    hidden, count = model.embed_tokens(ids), len(ids)
    kv_heads, group = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
    with torch.no_grad():
        for block in model.layers:
            attention, normed = block.self_attn, block.input_layernorm(hidden)
            q, k, v = (
                each(normed).unflatten(-1, (-1, attention.head_dim)).transpose(0, 1)
                for each in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            outs = []
            for at in range(count):
                held = seen[at].nonzero().squeeze(1)
                cos, sin = model.rotary_emb(q, torch.arange(len(held))[None])
                keys = apply_rotary_pos_emb(k[None, :, held], k[None, :, held], cos, sin)[1][0]
                query = apply_rotary_pos_emb(q[None, :, [at]], q[None, :, [at]], cos[:, -1:], sin[:, -1:])[0][0]
                scores = query.view(kv_heads, group, -1) @ keys.transpose(1, 2) * attention.scaling
                outs.append((scores.softmax(-1) @ v[:, held]).flatten())
            hidden = hidden + attention.o_proj(torch.stack(outs))
            hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
        return plain.lm_head(model.norm(hidden))


def differing(section: dict[str, Any], weights: Tensor, before: list[set[int]], kept: list[set[int]], stop: int) -> str:
    """Whether a layer's heads have kept of what they held `before` a slot what the method says; empty if so.

    Weights are ``[K, G, S, S]``; a choice between scores that are almost equal may go either way.
    """
    method, heads = section["method"], len(before)
    window, radius = section.get("window", 0), section.get("pool", 7) // 2 if "window" in section else 0
    recent = {"h2o": BUDGET // 2, "streaming_llm": 0}.get(method, window)
    scores: list[dict[int, float]] = []
    for head in range(heads):
        rows = weights[head, :, :stop, :stop]
        if method == "streaming_llm":
            given = torch.arange(stop).double()
            given[:4] = stop
        elif "reduce" in section:
            near = 2 * radius + 1
            far = torch.arange(stop)[:, None] - torch.arange(stop)[None] > near
            given = (rows * far).amax((0, 1))
        else:
            given = rows[:, 0 if method == "h2o" else -window :].sum((0, 1))
        given[stop - recent :] = 0
        held = torch.tensor(sorted(before[head]))
        there = torch.zeros(stop, dtype=torch.float64)
        there[held] = given[held]
        pooled = torch.nn.functional.max_pool1d(there[None], 2 * radius + 1, stride=1, padding=radius)[0]
        scores.append({slot: float("inf") if slot >= stop - recent else float(pooled[slot]) for slot in before[head]})
    floor = BUDGET
    if method == "ada_snapkv":
        floor = window + int(0.2 * (BUDGET - window))
    problems = []
    ranked = [sorted(each, key=lambda slot, each=each: (-each[slot], slot)) for each in scores]
    chosen = [set(order[:floor]) for order in ranked]
    if method == "ada_snapkv":
        rest = [(scores[h][slot], -slot, -h) for h in range(heads) for slot in ranked[h][floor:]]
        for _, slot, head in sorted(rest, reverse=True)[: (BUDGET - floor) * heads]:
            chosen[-head].add(-slot)
    bounds = [min(scores[h][slot] for slot in chosen[h]) for h in range(heads)]
    for head in range(heads):
        for slot in chosen[head] ^ kept[head]:
            if slot not in scores[head]:
                problems.append(f"{slot} was evicted before")
            elif abs(scores[head][slot] - min(bounds if method == "ada_snapkv" else [bounds[head]])) > 1e-4:
                problems.append(f"head {head}: {slot} of {scores[head][slot]}, bounds {bounds}")
    return "; ".join(problems)


def decode(engine: Any, plain: PreTrainedModel, section: dict[str, Any], steps: int) -> dict[str, Any]:
    """A padded prompt, tokens one by one, a question, and tokens again."""
    batch, width = len(LENGTHS), max(LENGTHS)
    passes = [width] + [1] * steps + [QUESTION] + [1] * (steps // 2)
    whole = torch.ones(batch, sum(passes), dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        whole[row, : width - length] = 0
    ids = torch.cat([ids_of(length, batch, 7 + index) for index, length in enumerate(passes)], dim=1)
    cache, found, start, most = None, [], 0, 0.0
    history: list[tuple[int, Any]] = []
    for length in passes:
        stop = start + length
        positions = (whole[:, :stop].cumsum(1) - 1).clamp(min=0)[:, start:]
        out = engine(ids[:, start:stop], attention_mask=whole[:, :stop], position_ids=positions, past_key_values=cache)
        cache, start = out.past_key_values, stop
        found.append(out.logits)
        if any(ranges and ranges[-1][1] == stop for ranges in cache.compressed):
            history.append((stop, (kept_slots(engine, cache), [list(each) for each in cache.compressed])))
        held = engine._comm.gather_objects([[cache.store(0).kept(row).sum() for row in range(batch)]])
        heads = plain.config.num_key_value_heads * (1 if engine._runtime.replicas or engine.mesh.tp_size <= 4 else 2)
        most = max(most, *(np.sum([rank[0] for rank in held], axis=0) / heads))
    problems: list[str] = []
    worst, evictions = 0.0, 0
    if engine.mesh.rank == 0:
        logits = torch.cat(found, dim=1)
        for row, length in enumerate(LENGTHS):
            first, own = width - length, []
            for stop, (kept, ranges) in history:
                if ranges[row] and ranges[row][-1][1] == stop:
                    own.append((stop - first, [[{s - first for s in head} for head in layer[row]] for layer in kept]))
            total = start - first
            heads = plain.config.num_key_value_heads
            seen = torch.ones(total, total).tril().bool().expand(len(plain.model.layers), heads, -1, -1).clone()
            for stop, layers in own:
                for layer, sets in enumerate(layers):
                    for head, slots in enumerate(sets):
                        gone = torch.ones(stop, dtype=torch.bool)
                        gone[torch.tensor(sorted(slots))] = False
                        seen[layer, head, stop:, :stop] &= ~gone
            expected, weights = reference(plain, ids[row, first:], seen)
            if section["method"] == "streaming_llm":
                expected = streaming_logits(plain, ids[row, first:], seen[0, 0])
            difference = (logits[row, first:].double() - expected).abs().max() / expected.abs().max()
            worst = max(worst, float(difference))
            for stop, layers in own:
                for layer, sets in enumerate(layers):
                    before = [
                        set(seen[layer, head, stop - 1, :stop].nonzero().flatten().tolist()) for head in range(heads)
                    ]
                    if section["method"] != "pyramidkv":
                        by_group = weights[layer].unflatten(0, (heads, -1))
                        told = differing(section, by_group, before, sets, stop)
                        problems += [f"row {row}, layer {layer}, {stop}: {told}"] if told else []
                evictions += 1
    return {
        "most": float(most),
        "error": worst,
        "problems": problems[:5],
        "evictions": evictions,
        "kept": [history[-1][1][0], history[-1][1][1]],
        "bytes": cache.nbytes(),
    }


def tokens_of(session: Any, ids: Tensor, new: int, **options: Any) -> list[list[int]]:
    """One turn: what is generated."""
    before = 0 if session.input_ids is None else session.input_ids.shape[1]
    options = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, **options}
    found: list[list[int]] = session.generate(ids, **options)[:, before + ids.shape[1] :].tolist()
    return found


def converse(engine: Any, folder: Path, saved: bool) -> dict[str, Any]:
    """Turns, pieces, forks, beams, cuts, a failure, and a session that was saved, here or on another mesh."""
    prompt, question, more = ids_of(90, 2, 1), ids_of(5, 2, 2), ids_of(80, 2, 3)

    def go_on(session: Any) -> list[Any]:
        return [tokens_of(session, question, 26), tokens_of(session, more, 15)]

    session, pieces = engine.session(), engine.session()
    first = tokens_of(session, prompt, 25)
    found: dict[str, Any] = {"pieces": tokens_of(pieces, prompt, 25, prefill_chunk_size=17) == first}
    fork, other = session.fork(), session.fork()
    if not saved:
        session.save(folder)
    dist.barrier()
    second = go_on(session)
    found["tokens"] = [first, second]
    found["fork"] = go_on(fork) == second
    chunked = [tokens_of(pieces, question, 26, prefill_chunk_size=2), tokens_of(pieces, more, 15, prefill_chunk_size=9)]
    found["pieces"] = found["pieces"] and chunked == second
    restored = engine.restore_session(folder)
    found["restored"] = go_on(restored) == second
    found["beams"] = tokens_of(other, question, 26, num_beams=3)
    # Into what was evicted: everything is read anew, as by a session that never had it.
    fresh = engine.session()
    other.cut_back(70)
    found["cut"] = other.length == 0
    again = tokens_of(other, question, 20)
    found["cut"] = found["cut"] and again == tokens_of(fresh, torch.cat([prompt[:, :70], question], dim=1), 20)
    # Behind it nothing is.
    reach, length = other._cache.reach, other.length
    other.cut_back(length - 1)
    found["cut"] = found["cut"] and reach < length and other.length == length - 1
    calls = [0]

    def fail(module: Any, args: Any) -> None:
        calls[0] += 1
        if engine._runtime.current.compression.evict:
            raise RuntimeError("out of memory, say")

    handle = engine.module.model.layers[1].register_forward_pre_hook(fail)
    try:
        tokens_of(fork, question, 30)
        found["failed"] = False
    except RuntimeError:
        found["failed"] = fork.length == 0
    handle.remove()
    expected = tokens_of(engine.session(), torch.cat([fork.input_ids, question], dim=1), 12)
    found["failed"] = found["failed"] and tokens_of(fork, question, 12) == expected
    return found


def main() -> None:
    """Entry of every rank."""
    out, work, meshes, steps = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split(","), int(sys.argv[5])
    folder = work / "decoding-model"
    begin(folder)
    plain = in_float64(folder)
    results: dict[str, Any] = {}
    for mesh in meshes:
        mapping = mapping_for(mesh, work)
        engine = megakv.init_inference(str(folder), config_of(mesh, {**BASE, **CASES["streaming_llm"]}, mapping))
        for name in sys.argv[4].split(","):
            section = {**BASE, **CASES[name]}
            compress_by(engine, section)
            results[f"{mesh} {name}"] = decode(engine, plain, section, steps)
            if name in CONVERSED:
                saved = work / f"{name}-session"
                found = converse(engine, saved, saved=(saved / "session.json").exists())
                results[f"{mesh} {name}"] |= found
        engine.destroy()
    if dist.get_rank() == 0:
        out.write_text(json.dumps(results))


if __name__ == "__main__":
    with orderly_end():
        main()
