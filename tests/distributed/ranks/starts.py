"""Started on every rank: engines that cannot be made, one after the other, and what they leave behind.

Usage: starts.py OUT.json WORK_DIR.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist
from families import FAMILIES, llama
from quantised_modules import quantised
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, RwkvConfig
from transformers.utils.logging import disable_progress_bar
from unfamiliar import ROWS, MixLayer, UnfamiliarConfig, UnfamiliarForCausalLM, unfamiliar

import megakv
from megakv.base.errors import MegaKVError
from megakv.distributed.mesh import start_distributed
from megakv.launcher.process import orderly_end, quiet_libraries

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 4}
IDS = torch.arange(3, 60)[None]


def resources() -> dict[str, Any]:
    """What this process holds that an engine could leave behind."""
    return {
        "threads": len(os.listdir("/proc/self/task")),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "SIGTERM": str(signal.getsignal(signal.SIGTERM)),
        "groups": len(dist.distributed_c10d._world.pg_map),
    }


def refused(action: Callable[[], Any]) -> str:
    """The message with which something is refused; empty if it is not."""
    try:
        action()
    except (MegaKVError, ValueError) as error:
        return str(error)
    return ""


def make_model(family: str = "llama", config: Any = None) -> Any:
    """A fresh model, the same on every rank."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config or FAMILIES[family](), dtype=torch.float32).eval()


def config_of(tp: int = 1, **section: Any) -> dict[str, Any]:
    """For this mesh of two ranks."""
    sizes = {"tensor_parallel": {"tp_size": tp}, "megakv": {"context_parallel": {"size": 2 // tp}, **section}}
    return {"dtype": "fp32", **sizes}


def failing_starts(work: Path) -> dict[str, Callable[[], Any]]:
    """Ways to fail, one in each stage of a start."""
    rank = dist.get_rank()
    good, broken, nowhere = work / "good", work / "broken", str(work / "file" / "folder")
    offload = {"enabled": True, "host_gb": 0.01, "page_kib": 8}
    start = megakv.init_inference
    return {
        "mapping": lambda: start(str(good), config_of(2, fairkv={"mapping": nowhere})),
        "no checkpoint": lambda: start(str(work / "nothing"), config_of()),
        "broken checkpoint": lambda: start(str(broken), config_of()),
        "one rank alone": lambda: start(str(broken if rank else good), config_of(2)),
        "another kind of model": lambda: start(make_model(config=rwkv()), config_of()),
        "profile": lambda: start(str(good), config_of(context_parallel={"size": 2, "profile": nowhere})),
        "disk": lambda: start(str(good), config_of(offload={**offload, "disk_gb": 0.01, "disk_path": nowhere})),
        "pages": lambda: start(str(good), config_of(offload={**offload, "host_gb": 0.00001})),
        "tracking": lambda: start(str(good), config_of(tracking={"json_path": f"{nowhere}/report.json"})),
        "other weights": lambda: start(differing("model.layers.1.self_attn.v_proj.weight"), config_of()),
        "other norms": lambda: start(differing("model.layers.0.post_attention_layernorm.weight"), config_of(2)),
        "other files": lambda: start(str(work / f"of-rank-{rank}"), config_of()),
        "quantised": lambda: start(quantised(make_model(), "subclass"), config_of(2)),
        "other config": lambda: start(make_model(config=llama(rms_norm_eps=0.01 * (1 + rank))), config_of()),
        "other rotation": lambda: start(make_model(config=turning(100 * (1 + rank))), config_of(2)),
        "unfamiliar": lambda: start(make_model(config=unfamiliar()), config_of(2)),
        "another's policy": lambda: start(str(good), config_of(2), injection_policy={MixLayer: ROWS}),
        "given module": lambda: start(make_model(config=rwkv()), config_of()),
    }


def differing(name: str) -> Any:
    """A model of which rank 1 has another tensor of one name."""
    model = make_model()
    model.get_parameter(name).data *= 1 + 0.01 * dist.get_rank()
    return model


def turning(theta: int) -> LlamaConfig:
    """A model whose weights do not show how fast positions turn."""
    return llama(rope_parameters={"rope_type": "default", "rope_theta": theta})


def rwkv() -> RwkvConfig:
    """No attention at all."""
    return RwkvConfig(vocab_size=99, hidden_size=32, num_hidden_layers=2, attention_hidden_size=32)


def plain(model: Any) -> Tensor:
    """What the model itself generates."""
    return model.generate(IDS, **GREEDY)


def shared_config(tp: int, family: str) -> dict[str, Any]:
    """Two models of one config object, one of which goes through an engine."""
    first = make_model(family)
    second = make_model(config=first.config)
    expected, config, before = plain(second), first.config, repr(first.config)
    result: dict[str, Any] = {}
    with megakv.init_inference(first, config_of(tp)) as engine:
        result["engine"] = torch.equal(engine.generate(IDS, **GREEDY), expected)
        result["other meanwhile"] = torch.equal(plain(second), expected)
        result["third meanwhile"] = torch.equal(plain(make_model(config=config)), expected)
        result["busy"] = refused(lambda: megakv.init_inference(first, config_of(tp)))
        result["still at work"] = torch.equal(engine.generate(IDS, **GREEDY), expected)
    result["closed"] = refused(lambda: engine.generate(IDS, **GREEDY))
    result["config"] = first.config is config and repr(config) == before
    result["other afterwards"] = torch.equal(plain(second), expected)
    if tp == 1:
        result["plain again"] = torch.equal(plain(first), expected)
        with megakv.init_inference(first, config_of(tp)) as engine:
            result["once more"] = torch.equal(engine.generate(IDS, **GREEDY), expected)
    else:
        result["spent"] = refused(lambda: megakv.init_inference(first, config_of(tp)))
    return result


def handlers(good: Path) -> dict[str, bool]:
    """Who has SIGTERM before, in and after engines."""

    def mine(*args: Any) -> None:
        """The user's own."""

    found = {}
    before = signal.getsignal(signal.SIGTERM)
    with megakv.init_inference(str(good), config_of()):
        found["engine's"] = signal.getsignal(signal.SIGTERM) != before
    found["given back"] = signal.getsignal(signal.SIGTERM) == before
    with megakv.init_inference(str(good), config_of()):
        signal.signal(signal.SIGTERM, mine)
    found["the user's stays"] = signal.getsignal(signal.SIGTERM) == mine
    signal.signal(signal.SIGTERM, before)
    return found


def inference_modes(good: Path) -> dict[str, list[bool]]:
    """Calls inside and outside of inference mode with methods that need neighbours."""
    expected, found = plain(AutoModelForCausalLM.from_pretrained(good, dtype=torch.float32)), {}
    for name, section in {
        "chain": {"context_parallel": {"size": 2, "prefill": "runahead"}},
        "pass-KV": {"context_parallel": {"size": 2, "prefill": "pass_kv", "decode": "pass_q"}},
        "tsp": {"context_parallel": {"size": 2, "prefill": "tsp"}},
    }.items():
        with megakv.init_inference(str(good), config_of(**section)) as engine:
            session, equal = engine.session(), []
            for inside in (True, False, True, False):
                with torch.inference_mode(inside):
                    equal.append(torch.equal(engine.generate(IDS, **GREEDY), expected))
                    session.generate(IDS[:, :20], **GREEDY)
            found[name] = equal
    return found


def by_policy(work: Path) -> dict[str, bool]:
    """A model that AutoTP does not know, over two tensor-parallel ranks, given and from its files by a JSON's names."""
    expected, config = plain(make_model(config=unfamiliar())), work / "policy.json"
    if dist.get_rank() == 0:
        make_model(config=unfamiliar()).save_pretrained(work / "unfamiliar")
        config.write_text(json.dumps(config_of(2) | {"injection_policy": {"MixLayer": ROWS}}))
    dist.barrier()
    with megakv.init_inference(
        make_model(config=unfamiliar()), config_of(2), injection_policy={MixLayer: ROWS}
    ) as engine:
        given = torch.equal(engine.generate(IDS, **GREEDY), expected)
    with megakv.init_inference(str(work / "unfamiliar"), config) as engine:
        return {"given": given, "by names": torch.equal(engine.generate(IDS, **GREEDY), expected)}


def main() -> None:
    """Entry of every rank."""
    out, work = Path(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    quiet_libraries()
    disable_progress_bar()
    AutoConfig.register("unfamiliar", UnfamiliarConfig)
    AutoModelForCausalLM.register(UnfamiliarConfig, UnfamiliarForCausalLM)
    start_distributed(tp_only=False, timeout_s=60)
    good = work / "good"
    if dist.get_rank() == 0:
        (work / "file").write_text("no folder")
        make_model(config=llama()).save_pretrained(good)
        make_model(config=llama()).save_pretrained(work / "broken")
        for rank in range(2):
            model = make_model(config=llama())
            model.model.embed_tokens.weight.data[41, 7] += 0.01 * rank
            model.save_pretrained(work / f"of-rank-{rank}")
        weights = work / "broken" / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:20000])
    dist.barrier()
    ways = failing_starts(work)
    # The first time also loads kernels and code.
    messages = {name: refused(start) for name, start in ways.items()}
    with megakv.init_inference(str(good), config_of()) as engine:
        engine.generate(IDS, **GREEDY)
    before = resources()
    for start in ways.values():
        refused(start)
    after = resources()
    results: dict[str, Any] = {"messages": messages, "before": before, "after": after}
    with megakv.init_inference(str(good), config_of()) as engine:
        results["good"] = torch.equal(
            engine.generate(IDS, **GREEDY), plain(AutoModelForCausalLM.from_pretrained(good, dtype=torch.float32))
        )
    results["ended"] = resources()
    results["policy"] = by_policy(work)
    results["quantised"] = {}
    for way in ("subclass", "unpacked"):
        with megakv.init_inference(quantised(make_model(), way), config_of()) as engine:
            results["quantised"][way] = torch.equal(engine.generate(IDS, **GREEDY), plain(quantised(make_model(), way)))
    for tp, family in ((1, "llama"), (2, "phi3"), (1, "bloom")):
        results[f"shared {family}"] = shared_config(tp, family)
    results["handlers"] = handlers(good)
    results["modes"] = inference_modes(good)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, results)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(everywhere))


if __name__ == "__main__":
    with orderly_end():
        main()
