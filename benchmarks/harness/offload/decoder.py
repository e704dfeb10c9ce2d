"""Ways to decode with keys and values off the accelerator, and without it for comparison, through `generate`."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor
from transformers import AutoConfig, DynamicCache, PreTrainedConfig, PreTrainedModel

import megakv
from megakv.costmodel.shape import ModelShape
from megakv.offload.costs import LayerSpeeds
from megakv.offload.link import EmulatedLink
from megakv.offload.record import StepRecord

from ..models import twin, weight_bytes
from ..timing import StepClock, clocked
from .emulation import EmulatedOffloadedCache, PacedReads, budgets
from .plan import IN_MEMORY, LARGE, OTHERS, PAGE_KIB, SMALL, WINDOW, WINDOWED, Case, variant

RECIPES = Path(__file__).resolve().parents[3] / "recipes"

WARM = 3  # Steps that are left out: they fill the pipeline, and the costs of the first are not learned yet
PASS_TOKENS = 64 << 10  # On a GPU, longer prompts are read in pieces of so many: what layers compute with must fit, too
ATTENTION_PIECES = (
    2  # Pieces that an attention's weights come in, row-by-row: those for keys and values, and the others
)
COPY_BYTES, COPIES = 1 << 30, 5


def pinned_copy_gb_s(device: torch.device) -> float:
    """GB/s of one large copy from page-locked memory to the accelerator: the median of several."""
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    there.copy_(host)
    rates = []
    for _ in range(COPIES):
        torch.cuda.synchronize(device)
        begun = time.perf_counter()
        there.copy_(host, non_blocking=True)
        torch.cuda.synchronize(device)
        rates.append(COPY_BYTES / (time.perf_counter() - begun) / 1e9)
    return statistics.median(rates)


def config_of(model: str, arguments: argparse.Namespace, *, positions: int = 1) -> PreTrainedConfig:
    """An OPT, where recomputing can pay; a Llama, which may have fewer KV heads; or a Qwen3 with windows."""
    if model in LARGE:
        config = AutoConfig.from_pretrained(RECIPES / LARGE[model])
        config.num_hidden_layers = arguments.layers or config.num_hidden_layers
    else:
        hidden, heads, layers = arguments.hidden, arguments.heads, arguments.layers
        sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": 512}
        own: dict[str, Any] = {"num_key_value_heads": heads, "intermediate_size": 4 * hidden}
        if model == "opt":
            own = {"word_embed_proj_dim": hidden, "ffn_dim": 4 * hidden}
        elif model == "gqa":
            own["num_key_value_heads"] = heads // 4
        elif model == WINDOWED:
            kinds = ["full_attention" if layer % 4 == 3 else "sliding_attention" for layer in range(layers)]
            own |= {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": kinds}
            own["head_dim"] = hidden // heads
        config = AutoConfig.for_model(SMALL[model], **sizes, **own)
    config.max_position_embeddings = positions
    config.eos_token_id = None
    return config


@dataclass
class Sample:
    """One generation."""

    tokens: Tensor
    all_seconds: list[float]  # From token to token
    prompt_s: float  # Until the prompt was read
    steps: list[StepRecord] = field(default_factory=list)  # What MegaKV's offload engine did in the counted ones
    waited_s: float | None = None  # In which the computation stood still in a counted step, where that is known
    # Weights, keys and values, and buffers on the accelerator in each counted step; on CUDA, all of torch's, at most
    device_bytes: list[int] = field(default_factory=list)
    bytes_in: float = 0.0  # Over the link, per counted step
    bytes_out: float = 0.0
    disk_io: str | None = None  # How a disk was read, where there was one

    @property
    def seconds(self) -> list[float]:
        """Seconds of the counted steps."""
        return self.all_seconds[WARM:]


class Decoder:
    """One method, ready to generate again and again."""

    def __init__(self, name: str, model: PreTrainedModel, case: Case, shape: ModelShape, *, chunk_tokens: int):
        self.name = name
        self._case, self._shape, self._model = case, shape, model
        self._engine: Any = None
        self._weight_bytes = weight_bytes(model)
        if model.device.type == "cuda":
            get_accelerator().empty_cache()
            get_accelerator().reset_peak_memory_stats()
        asked = variant(name)
        if asked.method == OTHERS:
            return
        offload: dict[str, Any] = {"enabled": asked.method != IN_MEMORY}
        if offload["enabled"]:
            offload |= {
                "method": asked.method,
                "kv_bits": asked.kv_bits,
                "weights": case.weights,
                "objective": "throughput" if asked.schedule == "_chosen" else "latency",
                "num_gpu_batches": asked.groups(case),
                "chunk_tokens": chunk_tokens,
                "emulated_link_gb_s": case.link_gb_s,
                "host_gb": case.host_bytes(shape) / (1 << 30),
                "page_kib": PAGE_KIB,
            }
            if case.in_memory is not None:
                offload |= budgets(case, shape)
        section: dict[str, Any] = {"offload": offload}
        if asked.budget is not None:
            section["fairkv"] = {"budget": asked.budget}
        self._engine = megakv.init_inference(twin(model), {"dtype": model.dtype, "megakv": section})
        if case.disk_gb_s is not None and offload["enabled"]:
            PacedReads(self._engine._offloader.pool.disk, case.disk_gb_s * 1e9)
        if asked.coarse:
            _wait_for_attention(self._engine._offloader)

    def generate(self, ids: Tensor, new: int) -> Sample:
        """Greedy tokens for a batch of prompts."""
        on_gpu = ids.device.type == "cuda"
        options: dict[str, Any] = {"num_beams": self._case.beams}
        if on_gpu and ids.numel() > PASS_TOKENS:
            options["prefill_chunk_size"] = PASS_TOKENS // len(ids)
        if self._engine is None:
            sample = self._with_transformers(ids, new, options)
        elif self._engine._offloader is None:
            sample, _ = self._sample(self._engine, ids, new, options)
            sample.waited_s = 0.0
            sample.device_bytes = [self._weight_bytes + self._kv_bytes(sample.tokens)] * len(sample.seconds)
        else:
            sample = self._offloaded(ids, new, options)
        if on_gpu:
            most = get_accelerator().max_memory_allocated() - (self._weight_bytes if self._case.weights else 0)
            sample.device_bytes = [int(most)] * len(sample.seconds)
        return sample

    def _sample(
        self, model: Any, ids: Tensor, new: int, options: dict[str, Any], *probes: Callable[[], float]
    ) -> tuple[Sample, list[tuple[float, ...]]]:
        """A generation, and what the probes said at each token."""
        clock = StepClock(*probes)
        tokens, clock = clocked(model.generate, ids, new, clock, **options)
        return Sample(tokens, clock.seconds(), clock.prompt_s), clock.noted

    def _offloaded(self, ids: Tensor, new: int, options: dict[str, Any]) -> Sample:
        offloader = self._engine._offloader
        sample, noted = self._sample(self._engine, ids, new, options, lambda: offloader.staging_bytes)
        # A prompt's later pieces are passes over cached tokens, too.
        steps = sample.steps = [step for step in offloader.steps if step.decoding][WARM:]
        sample.disk_io = offloader.disk_io
        if ids.device.type == "cpu":
            sample.waited_s = statistics.mean(step.waited_s for step in steps)
        stay = self._weight_bytes - (offloader.weights.step_bytes if self._case.weights else 0)
        sample.device_bytes = [stay + int(staging) for (staging,) in noted[1 + WARM :]]
        sample.bytes_in = statistics.mean(step.bytes_in for step in steps)
        sample.bytes_out = statistics.mean(step.bytes_out for step in steps)
        return sample

    def _with_transformers(self, ids: Tensor, new: int, options: dict[str, Any]) -> Sample:
        if ids.device.type == "cuda":
            options["past_key_values"] = DynamicCache(config=self._model.config, offloading=True)
            sample, _ = self._sample(self._model, ids, new, options)
            # It counts nothing: every layer comes whole, and goes back whole.
            sample.bytes_in = sample.bytes_out = float(self._kv_bytes(sample.tokens))
            return sample
        assert self._case.link_gb_s is not None
        link = EmulatedLink(self._case.link_gb_s * 1e9)
        cache = options["past_key_values"] = EmulatedOffloadedCache(link, self._model.config)
        probes = lambda: link.traffic["in"].nbytes, lambda: link.traffic["out"].nbytes, lambda: cache.waited_s
        sample, noted = self._sample(self._model, ids, new, options, *probes)
        link.close()
        # What the probes counted, per counted step.
        grown = [(last - first) / (len(noted) - 1 - WARM) for first, last in zip(noted[WARM], noted[-1], strict=True)]
        sample.bytes_in, sample.bytes_out, sample.waited_s = grown
        sample.device_bytes = [self._weight_bytes + cache.most_bytes] * len(sample.seconds)
        return sample

    def _kv_bytes(self, tokens: Tensor) -> int:
        """Bytes of the keys and values of a generation's tokens."""
        return tokens.numel() * len(self._shape.layers) * self._shape.attention().kv_row_bytes

    def profile(self) -> LayerSpeeds | None:
        """Speeds that were measured before the first step."""
        costs = getattr(getattr(self._engine, "_offloader", None), "costs", None)
        return None if costs is None else costs.measured

    def close(self) -> None:
        if self._engine is not None:
            self._engine.destroy()


def _wait_for_attention(offloader: Any) -> None:
    """Let recomputation begin only when all weights of a layer's attention are there (KVPR, Figure 5a)."""
    for layer, module in offloader._recomputation._modules.items():
        wait = partial(offloader.weights._await, layer, ATTENTION_PIECES)
        module.register_forward_pre_hook(wait, prepend=True)
