"""Started on every tensor-parallel rank: copies of KV heads that divide the batch, against the plain model.

Usage: batch_copies.py OUT.json WORK_DIR BATCHES ENGINES, batches separated by commas, and how many of the engines: the
sessions of one go on with other shares of the same heads, and with copies that divide tokens.
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
from families import llama
from mappings import random_mapping
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

import megakv
from megakv.cache.shares import owners
from megakv.distributed.mesh import start_distributed
from megakv.engine.session import Session
from megakv.fairkv.mapping import HeadMapping, by_rank
from megakv.launcher.process import orderly_end, quiet_libraries

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 7}
LENGTHS = (70, 3, 41, 1, 66)


def model() -> PreTrainedModel:
    """The same weights whenever it is called."""
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(llama(), dtype=torch.float32).eval()


def prompts(batch: int, seed: int, lengths: tuple[int, ...] = LENGTHS) -> tuple[Tensor, Tensor]:
    """A batch padded on the left, and its mask."""
    width = max(lengths[:batch])
    ids = torch.randint(3, 120, (batch, width), generator=torch.Generator().manual_seed(seed))
    return ids, (torch.arange(width)[None] >= width - torch.tensor(lengths[:batch])[:, None]).long()


def with_other_shares(mapping: HeadMapping) -> HeadMapping:
    """The same heads on the same ranks, which serve other parts of a batch."""
    rng = np.random.default_rng(3)
    layers = [layer.with_shares([rng.random(len(held)).tolist() for held in layer.ranks]) for layer in mapping.layers]
    return mapping.model_copy(update={"mapping": tuple(by_rank(layer, mapping.tp_size) for layer in layers)})


def misplaced(session: Session, mapping: HeadMapping) -> list[str]:
    """Sequences of which a head does not hold all tokens on the rank that serves them, or some elsewhere."""
    engine: Any = session._engine
    rank, cache, found = engine.mesh.tp_rank, session._cache, []
    for number, layer in enumerate(mapping.layers):
        held = engine._runtime.replicas._heads.shard(number, rank).kv_heads
        of_prompts = owners(layer, number)
        for row in range(cache.table.batch):
            total = int(cache.table.counts().sum(0)[row])
            wanted = [total if len(layer.ranks[h]) == 1 or of_prompts[h][row] == rank else 0 for h in held]
            if cache.store(number).kept(row).tolist() != wanted:
                found.append(f"layer {number}, row {row}: {cache.store(number).kept(row)}, not {wanted}")
    return found


def conversed(session: Session, plain: PreTrainedModel, batch: int, first: int, turns: int) -> bool:
    """Whether turns of a session, also one with beams, give the plain model's tokens of the whole conversation."""
    equal = True
    for turn in range(first, first + turns):
        ids, mask = prompts(batch, 10 + turn, (9, 14, 30, 2, 5) if turn else LENGTHS)
        if session.input_ids is not None and session.attention_mask is not None:
            whole = torch.cat([session.input_ids, ids], dim=1), torch.cat([session.attention_mask, mask], dim=1)
        else:
            whole = ids, mask
        options = GREEDY | ({"num_beams": 3} if turn == 1 else {})
        expected = plain.generate(whole[0], attention_mask=whole[1], **options)
        equal &= torch.equal(session.generate(ids, mask, **options), expected)
    return equal


def run_batch(engine: Any, plain: PreTrainedModel, batch: int) -> dict[str, Any]:
    """One call, with and without beams, and with several answers, against the plain model; and what was sent."""
    ids, mask = prompts(batch, batch)
    found = {}
    for name, own in (("greedy", {}), ("beams", {"num_beams": 4, "num_return_sequences": 2})):
        expected = plain.generate(ids, attention_mask=mask, **GREEDY | own)
        found[name] = torch.equal(engine.generate(ids, attention_mask=mask, **GREEDY | own), expected)
        found[f"{name} sent"] = sorted(
            {traffic.operation for rank in engine.report().ranks for traffic in rank.traffic}
        )
    return found


def main() -> None:
    """Entry of every rank."""
    out, work, batches = Path(sys.argv[1]), Path(sys.argv[2]), [int(batch) for batch in sys.argv[3].split(",")]
    torch.set_num_threads(1)
    quiet_libraries()
    disable_progress_bar()
    start_distributed(tp_only=True, timeout_s=60)
    size, plain = dist.get_world_size(), model()
    mapping = random_mapping(llama().num_hidden_layers, 4, size)
    given: list[Any] = [mapping]
    dist.broadcast_object_list(given)
    mapping = given[0]
    other = with_other_shares(mapping)
    if dist.get_rank() == 0:
        mapping.save(work / "mapping.json")
        other.save(work / "other.json")
    dist.barrier()
    results: dict[str, Any] = {"mapping": mapping.model_dump()["mapping"]}
    # By engine, those whose sessions it goes on with.
    for name, file, copies, before in (
        ("batch", "mapping", "batch", ()),
        ("tokens", "mapping", "tokens", ("batch",)),
        ("other shares", "other", "batch", ("batch", "tokens")),
    )[: int(sys.argv[4])]:
        section = {"fairkv": {"mapping": str(work / f"{file}.json"), "copies": copies}}
        engine = megakv.init_inference(
            model(), {"dtype": "fp32", "tensor_parallel": {"tp_size": size}, "megakv": section}
        )
        result: dict[str, Any] = {}
        if name == "batch":
            result |= {str(batch): run_batch(engine, plain, batch) for batch in batches}
        for source in before:
            session = engine.restore_session(work / f"session-{source}")
            placed = misplaced(session, mapping if file == "mapping" else other) if copies == "batch" else []
            result[f"from {source}"] = conversed(session, plain, max(batches), 3, 1)
            result["misplaced"] = [*result.get("misplaced", []), *placed]
        session = engine.session()
        result["turns"] = conversed(session, plain, max(batches), 0, 2)
        fork = session.fork()
        session.save(work / f"session-{name}")
        result["fork"] = conversed(fork, plain, max(batches), 2, 1) and conversed(session, plain, max(batches), 2, 1)
        if copies == "batch":
            result["misplaced"] = [
                *result.get("misplaced", []),
                *misplaced(session, mapping if file == "mapping" else other),
            ]
            result["misplaced"] = sum(engine._comm.gather_objects(result["misplaced"]), [])
        engine.destroy()
        results[name] = result
    if dist.get_rank() == 0:
        out.write_text(json.dumps(results))


if __name__ == "__main__":
    with orderly_end():
        main()
