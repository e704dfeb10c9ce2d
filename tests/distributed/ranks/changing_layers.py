"""Started on every rank: layers of which one rank alone listens to something, and biases that go elsewhere.

Usage: changing_layers.py MESH OUT.json: what differs from before, by name.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from families import FAMILIES
from transformers import AutoModelForCausalLM

import megakv
from megakv.costmodel.context_parallel import Workload
from tests.as_large import as_large


def model() -> Any:
    torch.manual_seed(0)
    config = FAMILIES["llama"](attention_bias=True, mlp_bias=True)
    found = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.3)
    return found


def last_logits(engine: Any, *, moved: bool) -> torch.Tensor:
    """After a prompt and two single tokens, between which output biases are put into other memory."""
    cache = engine.new_cache()
    engine.extend([cache], [list(range(5, 30))])
    engine.extend([cache], [[7]])
    taken = []
    for layer in engine.module.model.layers if moved else ():
        for linear in (layer.self_attn.o_proj, layer.mlp.down_proj):
            linear.bias.data = linear.bias.data.clone()
            taken += [torch.full_like(linear.bias.data, 1e4) for _ in range(200)]
    return engine.extend([cache], [[9]])


def main() -> None:
    """Entry of every rank."""
    torch.set_num_threads(1)
    cp, tp = (int(part) for part in sys.argv[1].split("x"))
    section = {"timeout_s": 60, "context_parallel": {"size": cp, "decode": "tensor"}}
    ids, options = torch.arange(3, 33)[None], {"max_new_tokens": 8, "do_sample": False}
    with ExitStack() as stack:
        stack.enter_context(as_large(section))
        engine = stack.enter_context(
            megakv.init_inference(model(), {"dtype": "fp32", "tensor_parallel": {"tp_size": tp}, "megakv": section})
        )
        plain, heard = engine.generate(ids, **options), list[int]()
        found = {"model": not torch.equal(plain, model().generate(ids, **options))}
        found["elsewhere"] = not torch.equal(last_logits(engine, moved=True), last_logits(engine, moved=False))
        # Fewer tokens than that are computed as a step of decoding is.
        short = model().generate(ids[:, :12], **options)
        found["short"] = not torch.equal(engine.generate(ids[:, :12], **options), short)
        in_memory = cp > 1 and engine._comm.channels["cp"].in_memory
        decodes = engine._runtime.planner.decodes(Workload((12,), (0,), cp))
        found["sharded"] = decodes != in_memory
        if engine.mesh.rank == 1:
            norm = engine.module.model.layers[1].post_attention_layernorm
            norm.register_forward_hook(lambda *_: heard.append(1))
        found["heard"] = not torch.equal(engine.generate(ids, **options), plain)
        found["unheard"] = len(heard) != (8 if engine.mesh.rank == 1 else 0)
        found["short, heard"] = not torch.equal(engine.generate(ids[:, :12], **options), short)
        question, session = torch.arange(40, 50)[None], engine.session()
        session.generate(ids, **options)
        whole = torch.cat((plain, question), 1)
        found["question"] = not torch.equal(session.generate(question, **options), model().generate(whole, **options))
        every = engine._comm.gather_objects(found)
    if engine.mesh.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(every))
    megakv.stop_distributed()


if __name__ == "__main__":
    main()
