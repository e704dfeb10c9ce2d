"""Started on every rank: what an engine promises beyond equal tokens. Each check writes figures; the test judges them.

Usage: properties.py OUT.json WORK_DIR CPxTP.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import torch
import torch.distributed as dist
from candidates import candidates
from families import FAMILIES, llama
from sessions import Plain
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.generation import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer
from transformers.utils.logging import disable_progress_bar

import megakv
from megakv.distributed.mesh import start_distributed
from megakv.launcher.process import orderly_end, quiet_libraries

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}


class Context:
    """The model on disk and the mesh that the checks run on."""

    def __init__(self, work: Path, mesh: str):
        self.work = work
        self.cp, self.tp = (int(part) for part in mesh.split("x"))
        self.rank = dist.get_rank()

    def folder(self, name: str, seed: int = 0, **changes: Any) -> Path:
        """A tiny model on disk, the same on every rank."""
        path = self.work / f"{name}-{seed}"
        if self.rank == 0 and not path.exists():
            torch.manual_seed(seed)
            config = llama(**changes) if changes else FAMILIES[name]()
            AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
        dist.barrier()
        return path

    def engine(self, folder: Path, dtype: str = "fp32", **section: Any) -> megakv.MegaKVEngine:
        """An engine on the whole mesh."""
        config = {
            "dtype": dtype,
            "tensor_parallel": {"tp_size": self.tp},
            "megakv": {"context_parallel": {"size": self.cp}, **section},
        }
        return megakv.init_inference(str(folder), config)

    def plain(self, folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
        """The plain transformers model."""
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def ids_of(length: int, batch: int = 1, seed: int = 1) -> torch.Tensor:
    """``[B, S]`` random tokens, the same on every rank."""
    return torch.randint(3, 120, (batch, length), generator=torch.Generator().manual_seed(seed))


def bf16_error(context: Context) -> dict[str, Any]:
    """RMS logit error against float64 of engine and plain model, both bf16, over seeds."""
    rows = []
    for seed in range(5):
        folder = context.folder("precise", seed, hidden_size=128, intermediate_size=256, num_hidden_layers=4)
        ids = ids_of(1024, seed=seed)
        engine = context.engine(folder, "bf16")
        logits = engine(ids).logits.double()
        engine.destroy()
        if context.rank == 0:
            with torch.no_grad():
                plain = context.plain(folder, torch.bfloat16)
                # The reference has the very weights of the bf16 models.
                exact = plain.to(torch.float64)(ids).logits
                single = context.plain(folder, torch.bfloat16)(ids).logits.double()
            rows.append([(x - exact).square().mean().sqrt().item() for x in (logits, single)])
    return {"engine_and_single": rows}


def kv_memory(context: Context) -> dict[str, Any]:
    """Bytes of every rank's cache after a prompt, and of the single-process cache."""
    folder = context.folder("llama")
    engine = context.engine(folder)
    engine.generate(ids_of(1001), max_new_tokens=1, **GREEDY)
    report = engine.report()
    engine.destroy()
    single = 0
    if context.rank == 0:
        with torch.no_grad():
            cache = context.plain(folder)(ids_of(1001), use_cache=True).past_key_values
        single = sum(t.numel() * t.element_size() for layer in cache.layers for t in (layer.keys, layer.values))
    return {"ranks": [rank.kv_bytes for rank in report.ranks], "single": single}


def session_turns(context: Context) -> dict[str, Any]:
    """Turns of a session against the plain model on the whole conversation."""
    folder = context.folder("llama")
    engine = context.engine(folder)
    plain = Plain(folder)
    session = engine.session()
    history = ids_of(0)
    equal = []
    for turn, (length, new) in enumerate([(1000, 3), (3, 5), (250, 1), (1, 20), (77, 4)]):
        ids = ids_of(length, seed=turn)
        history = torch.cat([history, ids], dim=1)
        expected = plain.generate(history, max_new_tokens=new, **GREEDY)
        found = session.generate(ids, max_new_tokens=new, **GREEDY)
        equal.append(torch.equal(expected, found))
        history = expected
    counts = session._cache.table.counts().sum(axis=1)
    session.cut_back(900)
    again = torch.cat([history[:, :900], ids_of(33, seed=50)], dim=1)
    found = session.generate(ids_of(33, seed=50), max_new_tokens=4, **GREEDY)
    equal.append(torch.equal(found, plain.generate(again, max_new_tokens=4, **GREEDY)))
    session.close()
    engine.destroy()
    return {"equal": equal, "spread": int(counts.max() - counts.min())}


class Counted(StoppingCriteria):
    """A user's criterion that stops after some calls."""

    def __init__(self, calls: int):
        self.calls = calls

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.calls -= 1
        return torch.full((len(input_ids),), self.calls <= 0)


class Listener(BaseStreamer):
    """Counts what is streamed."""

    def __init__(self) -> None:
        self.tokens = 0
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.numel()

    def end(self) -> None:
        self.ended = True


def rank_zero_decides(context: Context) -> dict[str, Any]:
    """Different seeds, clocks and criteria on the ranks: rank 0's hold, and nobody hangs."""
    engine = context.engine(context.folder("llama"))
    plain = context.plain(context.folder("llama"))
    sampling = {"do_sample": True, "max_new_tokens": 12, "pad_token_id": 0}
    torch.manual_seed(1000 + context.rank)
    sampled = engine.generate(ids_of(30), **sampling)
    torch.manual_seed(1000)
    expected = plain.generate(ids_of(30), **sampling)
    timed = engine.generate(ids_of(30), max_new_tokens=500, max_time=0.2 * (context.rank + 1), **GREEDY)
    engine.module.generation_config.max_time = 0.2 * (context.rank + 1)
    config = GenerationConfig(max_new_tokens=500, pad_token_id=0)
    by_model = engine.generate(ids_of(30), generation_config=config)
    engine.module.generation_config.max_time = None
    own = StoppingCriteriaList([Counted(4 + context.rank)])
    stopped = engine.generate(ids_of(30), max_new_tokens=50, stopping_criteria=own, **GREEDY)
    listener = Listener()
    engine.generate(ids_of(30), max_new_tokens=6, streamer=listener, **GREEDY)
    lengths = engine._comm.gather_objects((timed.shape[1], by_model.shape[1], stopped.shape[1], listener.tokens))
    engine.destroy()
    return {"sampled": torch.equal(sampled, expected), "lengths": lengths, "ended": listener.ended}


def other_inputs(context: Context) -> dict[str, Any]:
    """Inputs other than a plain prompt, against the plain model."""
    folder = context.folder("llama")
    engine, plain = context.engine(folder), context.plain(folder)
    ids = ids_of(50, 2)
    right = torch.ones_like(ids)
    right[1, 31:] = 0
    embeds = plain.get_input_embeddings()(ids).detach()
    with torch.no_grad():
        wanted = plain(ids).logits
        padded = plain(ids, attention_mask=right).logits
        checks = {
            "positional": (engine(ids).logits, wanted),
            "embeds": (engine(inputs_embeds=embeds).logits, wanted),
            "keep 1": (engine(ids, logits_to_keep=1).logits, wanted[:, -1:]),
            "keep 7": (engine(ids, logits_to_keep=7).logits, wanted[:, -7:]),
            "right padding": (engine(ids, attention_mask=right).logits[right.bool()], padded[right.bool()]),
            "tuple": (engine(ids, return_dict=False)[0], wanted),
        }
        half = engine(ids[:, :20], use_cache=True)
        rest = engine(ids[:, 20:], past_key_values=half.past_key_values)
        checks["continued"] = (torch.cat([half.logits, rest.logits], dim=1), wanted)
    errors = {name: ((a - b).abs().max() / b.abs().max()).item() for name, (a, b) in checks.items()}
    # What right-padded rows should continue with: the same as each row alone.
    together = engine.generate(ids, attention_mask=right, max_new_tokens=5, **GREEDY)[:, 50:]
    alone = torch.cat(
        [
            plain.generate(ids[:1], max_new_tokens=5, **GREEDY)[:, 50:],
            plain.generate(ids[1:, :31], max_new_tokens=5, **GREEDY)[:, 31:],
        ]
    )
    uncached = engine.generate(ids, max_new_tokens=4, use_cache=False, **GREEDY)
    beams = {"max_new_tokens": 4, "use_cache": False, "num_beams": 2, **GREEDY}
    both_beams = torch.equal(engine.generate(ids, **beams), plain.generate(ids, **beams))
    bare = engine(ids, use_cache=False, return_dict=False)
    embedded = engine.generate(inputs_embeds=embeds, max_new_tokens=4, use_cache=False, **GREEDY)
    uncached_config = GenerationConfig(max_new_tokens=4, use_cache=False, pad_token_id=0)
    configured = engine.generate(ids, generation_config=uncached_config)
    chunked = engine.generate(ids, max_new_tokens=4, prefill_chunk_size=16, **GREEDY)
    four = plain.generate(ids, max_new_tokens=4, **GREEDY)
    other = context.engine(folder)
    both = torch.equal(other(ids).logits, engine(ids).logits)
    other.destroy()
    engine.destroy()
    return {
        "errors": errors,
        "equal": {
            "right-padded generate": torch.equal(together, alone),
            "use_cache=False": torch.equal(uncached, four),
            "beams, use_cache=False": both_beams,
            "no cache in a tuple": len(bare) == 1,
            "configured without a cache": torch.equal(configured, four),
            "embeds, use_cache=False": torch.equal(embedded, four[:, 50:]),
            "prefill_chunk_size": torch.equal(chunked, four),
            "two engines": both,
        },
    }


def refusals(context: Context) -> dict[str, Any]:
    """Messages of what is refused, with the engine alive afterwards."""
    folder = context.folder("llama")
    engine = context.engine(folder)
    opt = context.engine(context.folder("opt"))
    ids = ids_of(10)
    session = engine.session()
    session.generate(ids, max_new_tokens=2, **GREEDY)
    attempts: dict[str, Callable[[], Any]] = {
        "labels": lambda: engine(ids, labels=ids),
        "output_attentions": lambda: engine(ids, output_attentions=True),
        "4-D mask": lambda: engine(ids, attention_mask=torch.ones(1, 1, 10, 10)),
        "empty prompt": lambda: engine.generate(ids[:, :0]),
        "all padding": lambda: engine(ids, attention_mask=torch.zeros_like(ids)),
        "long prompt": lambda: engine.generate(ids_of(5000)),
        "long output": lambda: opt.generate(ids, max_new_tokens=5000),
        "assistant_model": lambda: engine.generate(ids, assistant_model=engine.module),
        "guidance_scale": lambda: engine.generate(ids, guidance_scale=2.0),
        "cache_implementation": lambda: engine.generate(ids, cache_implementation="static"),
        "session batch": lambda: session.generate(ids_of(4, 2), max_new_tokens=2, **GREEDY),
        "session cut": lambda: session.cut_back(1000),
    }
    messages = {}
    for name, attempt in attempts.items():
        try:
            attempt()
            messages[name] = ""
        except ValueError as error:
            messages[name] = str(error)
    expected = engine.generate(ids, max_new_tokens=2, **GREEDY)
    alive = torch.equal(expected[:, :12], session.input_ids)
    engine.destroy()
    opt.destroy()
    for name, attempt in {"closed": lambda: engine(ids), "closed session": lambda: session.generate(ids)}.items():
        try:
            attempt()
        except megakv.base.errors.MegaKVError as error:
            messages[name] = str(error)
    return {"messages": messages, "alive": alive}


CHECKS = [bf16_error, kv_memory, session_turns, rank_zero_decides, other_inputs, refusals, candidates]


def main() -> None:
    """Entry of every rank."""
    out, work, mesh = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    quiet_libraries()
    disable_progress_bar()
    start_distributed(tp_only=False, timeout_s=300)
    context = Context(work, mesh)
    results = {check.__name__: check(context) for check in CHECKS}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    with orderly_end():
        main()
