"""Started on every rank: models whose heads are placed by random mappings, against the plain ones.

Usage: placement.py OUT.json WORK_DIR CASES, a case being CPxTP:FAMILY:TOKENS:BEAMS, with :METHOD offloaded
by that method; separated by commas.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from families import FAMILIES, llama
from mappings import random_mapping
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

import megakv
from megakv.base.errors import MegaKVError
from megakv.distributed.mesh import start_distributed
from megakv.fairkv.profile import ModelIdentity
from megakv.launcher.process import orderly_end, quiet_libraries
from megakv.weights.placement import head_counts

LENGTHS = (90, 70, 20)
# A slow link, so that the host attends to some.
OFFLOAD = {"enabled": True, "host_gb": 0.02, "page_kib": 4, "chunk_tokens": 16, "emulated_link_gb_s": 0.001}


def prompts() -> tuple[Tensor, Tensor]:
    """A ragged batch, padded on the left, and its mask."""
    ids = torch.randint(3, 120, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    for row, length in enumerate(LENGTHS):
        mask[row, : -length or None] = 0
        mask[row, -length:] = 1
    return ids, mask


def model_of(family: str) -> PreTrainedModel:
    """The same weights whenever it is called."""
    torch.manual_seed(1)
    return AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=torch.float32).eval()


def config_of(cp: int, tp: int, mapping: Path, *methods: str) -> dict[str, Any]:
    """The JSON of an engine, which offloads by a method if one is given."""
    section: dict[str, Any] = {"context_parallel": {"size": cp}, "fairkv": {"mapping": str(mapping)}}
    for method in methods:
        section["offload"] = {**OFFLOAD, "method": method}
    return {"dtype": "fp32", "tensor_parallel": {"tp_size": tp}, "megakv": section}


def run_case(case: str, mapping: Path) -> dict[str, Any]:
    """Generate with one family under a new mapping; what it was, and whether the tokens are the plain model's."""
    shape, family, tokens, beams, *methods = case.split(":")
    cp, tp = (int(part) for part in shape.split("x"))
    plain = model_of(family)
    layers, _, kv_heads = head_counts(plain.config)
    if dist.get_rank() == 0:
        random_mapping(layers, kv_heads, tp).save(mapping)
    dist.barrier()
    ids, mask = prompts()
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": int(tokens), "num_beams": int(beams)}
    expected = plain.generate(ids, do_sample=False, pad_token_id=0, **options)
    engine = megakv.init_inference(model_of(family), config_of(cp, tp, mapping, *methods))
    found = engine.generate(ids, do_sample=False, pad_token_id=0, **options)
    report = engine.report()
    scalars = report.scalars()
    engine.destroy()
    balance = report.balance
    assert balance is not None
    return {
        "mapping": json.loads(mapping.read_text())["mapping"],
        "equal": torch.equal(found, expected),
        "held": [[sum(layer) for layer in rank.head_tokens] for rank in report.ranks],
        "slots": int(beams) * (sum(LENGTHS) + len(LENGTHS) * (found.shape[1] - ids.shape[1] - 1)),
        "busy_rates": balance.busy_rates,
        "digest": balance.digest,
        "scalars": sorted(name for name in scalars if name.startswith("fairkv/")),
    }


def identity_of(seed: int, **changes: Any) -> ModelIdentity:
    """Of another tiny Llama with as many layers and KV heads."""
    torch.manual_seed(100 + seed)
    return ModelIdentity.of_model(AutoModelForCausalLM.from_config(llama(**changes), dtype=torch.float32))


def refusal(cp: int, tp: int, mapping: Path) -> str:
    """What an engine for the tiny Llama says of a mapping."""
    try:
        megakv.init_inference(model_of("llama"), config_of(cp, tp, mapping)).destroy()
    except (ValueError, MegaKVError) as error:
        return str(error)
    return ""


def main() -> None:
    """Entry of every rank."""
    out, work, cases = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split(",")
    torch.set_num_threads(1)
    quiet_libraries()
    disable_progress_bar()
    start_distributed(tp_only=False, timeout_s=60)
    results: dict[str, Any] = {case: run_case(case, work / "mapping.json") for case in cases}
    size = dist.get_world_size()
    layers = llama().num_hidden_layers
    if dist.get_rank() == 0:
        random_mapping(layers, 4, 2).save(work / "two.json")
        random_mapping(layers + 1, 4, size).save(work / "longer.json")
        for name, identity in (("weights", identity_of(1)), ("sizes", identity_of(0, hidden_size=32))):
            random_mapping(layers, 4, size).model_copy(update={"identity": identity}).save(work / f"{name}.json")
        own_weights = ModelIdentity.of_model(model_of("llama"))
        random_mapping(layers, 4, size).model_copy(update={"identity": own_weights}).save(work / "right.json")
        (work / "broken.json").write_text((work / "two.json").read_text()[:-200])
    dist.barrier()
    refused = {
        name: refusal(1, size, work / f"{name}.json")
        for name in ("two", "longer", "broken", "missing", "sizes", "weights", "right")
    }
    # Each rank its own file, as on hosts that do not share a folder.
    own = work / f"own{dist.get_rank() % 2}.json"
    random_mapping(layers, 4, size).save(own) if dist.get_rank() < 2 else None
    dist.barrier()
    refused["different"] = refusal(1, size, own)
    if dist.get_rank() == 0:
        out.write_text(json.dumps({"cases": results, "refused": refused}))


if __name__ == "__main__":
    with orderly_end():
        main()
