"""Where a prompt's time goes on a GPU, kernel by kernel, beside transformers; attention by library; FP8's products.

Usage: gpu_kernels.py --json FILE [--tiny]. It tells in half a minute what to mend: for four layers of Llama 3.1 8B's
shape the kernels of a prompt and of a step by time, the host's time beside the device's; for lengths from 1K to 32K
attention by FlashAttention, by cuDNN and as PyTorch chooses, and what cuDNN's first call of a size takes; products of
FP8 layers against those of bfloat16.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

import megakv
from megakv.attention.backends import cuda_cudnn, cuda_flash
from megakv.launcher.process import quiet_libraries
from megakv.weights.formats.fp8 import Fp8Linear, quantise

ROUNDS, NEW = 5, 6


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(device: str, call: Callable[[], object], rounds: int = ROUNDS) -> list[float]:
    """Of each round, the device's work to its end; the first is what a call takes that comes for the first time."""
    found = []
    for _ in range(1 + rounds):
        synchronize(device)
        began = time.perf_counter()
        call()
        synchronize(device)
        found.append(time.perf_counter() - began)
    return found


def shape(*, tiny: bool) -> LlamaConfig:
    if tiny:
        return LlamaConfig(
            vocab_size=99, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
            num_key_value_heads=2,
        )  # fmt: skip
    return LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=65536,
    )  # fmt: skip


def by_kernel(device: str, call: Callable[[], object]) -> dict[str, Any]:
    """What a call has the device do: seconds by kernel, how many, and the host's and the device's time in all."""
    times = seconds(device, call, 3)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as found:
        call()
        synchronize(device)
    kernels, counts = defaultdict[str, float](float), defaultdict[str, int](int)
    for event in found.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels[event.name[:90]] += event.device_time_total * 1e-6
            counts[event.name[:90]] += 1
    most = sorted(kernels, key=lambda name: -kernels[name])[:12]
    return {
        "seconds": times[1:], "device_s": sum(kernels.values()), "kernels": sum(counts.values()),
        "most": [{"kernel": name, "times": counts[name], "seconds": kernels[name]} for name in most],
    }  # fmt: skip


@torch.no_grad()
def prompts(device: str, *, tiny: bool) -> list[dict[str, Any]]:
    """Rows of both libraries: a prompt of one sequence, of several, and a step."""
    torch.manual_seed(0)
    dtype = torch.float32 if tiny else torch.bfloat16
    with torch.device(device):
        plain: Any = AutoModelForCausalLM.from_config(shape(tiny=tiny), dtype=dtype).eval()
    engine: Any = megakv.init_inference(copy.deepcopy(plain), {"dtype": "fp32" if tiny else "bf16"})
    rows = []
    for batch, length in ((1, 20), (2, 9)) if tiny else ((1, 8192), (1, 32768), (16, 1024)):
        ids = torch.randint(3, 90, (batch, length), device=device)
        options = {"do_sample": False, "pad_token_id": 0}
        for name, model in (("transformers", plain), ("megakv", engine)):
            for stage, new in (("prompt", 1), ("prompt and steps", NEW)):
                whole = {**options, "max_new_tokens": new, "min_new_tokens": new}
                found = by_kernel(device, lambda model=model, ids=ids, whole=whole: model.generate(ids, **whole))
                case = {"part": "kernels", "library": name, "stage": stage, "batch": batch, "length": length}
                rows.append(case | found)
    engine.destroy()
    return rows


@torch.no_grad()
def attention(device: str, *, tiny: bool) -> list[dict[str, Any]]:
    """Rows of every way, length by length: of a processor, there is PyTorch's choice alone."""
    rows = []
    for heads, kv_heads, dim in ((4, 2, 16),) if tiny else ((32, 8, 128), (9, 3, 64)):
        for length in (16,) if tiny else (1024, 2048, 4096, 8192, 16384, 32768):
            dtype = torch.float32 if tiny else torch.bfloat16
            q, k, v = (torch.randn(n, length, dim, device=device, dtype=dtype) for n in (heads, kv_heads, kv_heads))
            ways: dict[str, Callable[[], object]] = {"chosen": lambda q=q, k=k, v=v: chosen(q, k, v)}
            if device == "cuda":
                for name, kernel in (("flash", cuda_flash), ("cudnn", cuda_cudnn)):
                    ways[name] = lambda kernel=kernel, q=q, k=k, v=v, dim=dim: kernel(q, k, v, dim**-0.5, causal=True)
            flops = 2.0 * heads * length**2 * dim
            for name, call in ways.items():
                first, *rest = seconds(device, call)
                row = {"part": "attention", "way": name, "heads": heads, "dim": dim, "length": length}
                rows.append({**row, "first_s": first, "seconds": rest, "tflops": flops / min(rest) / 1e12})
    return rows


def chosen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As transformers has it."""
    return F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)


@torch.no_grad()
def fp8(device: str, *, tiny: bool) -> list[dict[str, Any]]:
    """Rows of a feed-forward's product, by tokens; none where the device has no FP8."""
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        return []
    inputs, outputs = (64, 96) if tiny else (4096, 14336)
    dtype = torch.float32 if tiny else torch.bfloat16
    linear = nn.Linear(inputs, outputs, bias=False, dtype=dtype, device=device).requires_grad_(False)
    small = Fp8Linear(linear)
    quantise(small, "weight", linear.weight)
    rows = []
    for tokens in (1, 3) if tiny else (1, 16, 1024, 8192):
        x = torch.randn(tokens, inputs, dtype=dtype, device=device)
        row = {"part": "fp8", "tokens": tokens, "inputs": inputs, "outputs": outputs}
        for name, module in (("plain", linear), ("fp8", small)):
            row[f"{name}_seconds"] = seconds(device, lambda module=module, x=x: module(x))[1:]
        rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where to write what was measured, part by part")
    parser.add_argument("--tiny", action="store_true", help="on the processor, to try it")
    arguments = parser.parse_args()
    quiet_libraries()
    device, rows = "cpu" if arguments.tiny else "cuda", list[dict[str, Any]]()
    for part in (attention, fp8, prompts):
        rows += part(device, tiny=arguments.tiny)
        arguments.json.write_text(json.dumps({"benchmark": "gpu_kernels", "rows": rows}, indent=1) + "\n")
        print(part.__name__, len(rows), "rows", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
