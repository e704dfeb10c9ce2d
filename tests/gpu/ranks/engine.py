"""Started on one rank, on whatever accelerator there is: an engine against the plain model on the same device.

Usage: engine.py OUT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig

import megakv
from megakv.launcher.process import orderly_end, quiet_libraries

NEW_TOKENS = 16
LENGTHS = (300, 7, 1)


def tiny_llama() -> LlamaConfig:
    """Llama whose head dimension suits every kernel."""
    return LlamaConfig(
        vocab_size=199,
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=352,
        initializer_range=0.08,
        eos_token_id=None,
    )


def judge(dtype: torch.dtype) -> dict[str, Any]:
    """How far an engine's logits are from the plain model's, and whether its greedy tokens are the same."""
    torch.manual_seed(0)
    whole = AutoModelForCausalLM.from_config(tiny_llama(), dtype=dtype)
    other = AutoModelForCausalLM.from_config(tiny_llama(), dtype=dtype)
    other.load_state_dict(whole.state_dict())
    engine = megakv.init_inference(other, {"megakv": {"context_parallel": {"size": 1}}})
    device = engine.mesh.device
    whole = whole.eval().to(device)
    errors, equal = [], []
    for length in LENGTHS:
        ids = torch.randint(1, 199, (2, length)).to(device)
        with torch.no_grad():
            wanted = whole(ids).logits.double()
        errors.append(float((engine(input_ids=ids).logits.double() - wanted).norm() / wanted.norm()))
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
        tokens = whole.generate(ids, attention_mask=torch.ones_like(ids), **options)
        equal.append(torch.equal(engine.generate(ids, **options), tokens))
    peak = engine.report().ranks[0].peak_bytes
    engine.destroy()
    return {"device": device.type, "errors": errors, "tokens_equal": equal, "peak_bytes": peak}


def main() -> None:
    """Entry of the rank."""
    quiet_libraries()
    found: dict[str, Any] = {str(dtype): judge(dtype) for dtype in (torch.float32, torch.bfloat16)}
    total = torch.full((3,), 2.5, device=found["torch.float32"]["device"])
    dist.all_reduce(total)
    found["backend"], found["sum"] = dist.get_backend(), total.tolist()
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    with orderly_end():
        main()
