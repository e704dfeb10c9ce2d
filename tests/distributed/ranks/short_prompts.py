"""Started on every rank: prompts whose layers are one call, in which ranks have all keys and values.

Usage: short_prompts.py CP OUT.json: by rank, what differs from the plain model, by name, and how often it was so.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from families import FAMILIES
from transformers import AutoModelForCausalLM

import megakv

SIZES = {"max_position_embeddings": 1024}
MODELS = (("llama", {}), ("mistral", {"sliding_window": 90}), ("qwen3", {}))
OPTIONS = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
SHAPES = (((1, 301), (0,)), ((3, 260), (0, 130, 259)))


def model(name: str, settings: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = FAMILIES[name]()
    config.update({**SIZES, **settings})
    found = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    found.generation_config.eos_token_id = None
    return found


def drawn(*shape: int) -> torch.Tensor:
    return torch.randint(3, 120, shape, generator=torch.Generator().manual_seed(sum(shape)))


def differs(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return not torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


def main() -> None:
    """Entry of every rank."""
    torch.set_num_threads(1)
    cp, wrong, bytes_sent = int(sys.argv[1]), dict[str, bool](), list[list[int]]()
    for name, settings in MODELS:
        plain = model(name, settings)
        with ExitStack() as stack:
            section = {"timeout_s": 60, "context_parallel": {"size": cp}}
            engine = stack.enter_context(
                megakv.init_inference(model(name, settings), {"dtype": "fp32", "megakv": section})
            )
            planner = engine._runtime.planner
            in_memory = planner.traits.spread_rows > 0
            # Whatever this machine multiplies fastest.
            planner.traits = replace(planner.traits, sliced_rows=0, spread_rows=2048)

            def compare(
                what: str, engine: Any = engine, plain: Any = plain, name: str = name, options: Any = OPTIONS
            ) -> None:
                for shape, pads in SHAPES:
                    ids, mask = drawn(*shape), torch.ones(shape, dtype=torch.long)
                    for row, pad in enumerate(pads):
                        mask[row, :pad] = 0
                    given = {"input_ids": ids, "attention_mask": mask}
                    case = f"{name} {list(shape)} {what}"
                    wrong[case] = not torch.equal(
                        engine.generate(**given, **options), plain.generate(**given, **options)
                    )
                    with torch.no_grad():
                        found, expected = engine(**given).logits, plain(**given).logits
                    wrong[f"{case} logits"] = differs(found * mask[..., None], expected * mask[..., None])

            plans, plan = list[Any](), engine._runtime.plan
            engine._runtime.plan = lambda *given, plan=plan, plans=plans, **more: (
                plans.append(plan(*given, **more)) or plans[-1]
            )
            compare("prompts")
            # Layers behind the first one had been computed with it.
            apart = [each for each in plans if len(each.tokens) > 64 and each.state.ahead is None]
            wrong[f"{name} at once"] = in_memory and bool(apart)
            engine.generate(drawn(1, 301), **OPTIONS)
            traffic = engine.report().ranks[engine.mesh.rank].traffic
            bytes_sent.append([each.bytes_sent for each in traffic if each.operation == "all_gather"])
            session, first, second = engine.session(), drawn(1, 301), drawn(1, 280)
            whole = torch.cat((session.generate(first, **OPTIONS), second), 1)
            wrong[f"{name} turns"] = not torch.equal(
                session.generate(second, **OPTIONS), plain.generate(whole, **OPTIONS)
            )
            caches = [engine.new_cache() for _ in range(2)]
            tokens = [drawn(1, 180)[0].tolist(), drawn(1, 150)[0].tolist()]
            logits = engine.extend(caches, tokens)
            with torch.no_grad():
                each = [plain(torch.tensor([own])).logits[0, -1] for own in tokens]
            wrong[f"{name} several"] = any(differs(one, two) for one, two in zip(logits, each, strict=True))
            if engine.mesh.rank == 1:
                engine.module.model.layers[1].post_attention_layernorm.register_forward_hook(lambda *_: None)
            compare("heard")
            every = engine._comm.gather_objects({"wrong": wrong, "sent": bytes_sent, "in_memory": in_memory})
    if engine.mesh.rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(every))
    megakv.stop_distributed()


if __name__ == "__main__":
    main()
