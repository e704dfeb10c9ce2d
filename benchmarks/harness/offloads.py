"""Ways to decode with keys and values off the accelerator, over one emulated link, and without it for comparison."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    LlamaConfig,
    OPTConfig,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
)

import megakv
from megakv.offload.link import MemoryRows, Move, Ticket
from megakv.offload.record import StepRecord
from megakv.offload.thread_link import ThreadLink

from .models import twin

IN_MEMORY, OTHERS = "in_memory", "transformers"
OWN = ("stream", "kvpr", "chunked", "cpu_rank", "auto")
METHODS = (IN_MEMORY, OTHERS, *OWN)
SHAPES = ("opt", "gqa")
WARM = 3
"""Steps that are left out: they fill the pipeline, and the costs of the first are not learned yet."""
SETTINGS = {"host_gb": 1.0, "page_kib": 512}


def random_model(shape: str, *, layers: int, hidden: int, heads: int, positions: int) -> PreTrainedModel:
    """OPT, where recomputing can pay, or a Llama with a KV head for four query heads, where it cannot."""
    common = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": 512}
    config = (
        OPTConfig(**common, word_embed_proj_dim=hidden, ffn_dim=4 * hidden, max_position_embeddings=positions)
        if shape == "opt"
        else LlamaConfig(
            **common,
            num_key_value_heads=heads // 4,
            intermediate_size=4 * hidden,
            max_position_embeddings=positions,
        )
    )
    config.eos_token_id = None
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


class _Clock(StoppingCriteria):
    """Notes when each token is there; stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class EmulatedOffloadedCache(DynamicCache):
    """What transformers' ``DynamicCache(offloading=True)`` moves, and when, over an emulated link.

    That cache needs CUDA streams. As there: a layer is brought while the one before computes, and copied back whole, in
    line with the computation, as soon as its new tokens are in it.

    Parameters
    ----------
    link : ThreadLink
    """

    def __init__(self, link: ThreadLink):
        super().__init__()
        self._link = link
        self._host: dict[int, tuple[Tensor, Tensor]] = {}
        self._coming: dict[int, Ticket] = {}

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Keys and values of all tokens."""
        self._bring(layer_idx)
        if layer_idx in self._coming:
            self._coming.pop(layer_idx).wait()
        self._bring(layer_idx + 1 if layer_idx + 1 in self._host else 0, ahead=True, besides=layer_idx)
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        host = torch.empty_like(keys), torch.empty_like(values)
        pairs = zip(host, (keys.contiguous(), values.contiguous()), strict=True)
        self._link.start("out", [self._move(kept, there) for kept, there in pairs]).settle()
        self._host[layer_idx] = host
        layer: Any = self.layers[layer_idx]
        layer.keys = layer.values = torch.empty(0)
        return keys, values

    def _bring(self, index: int, *, ahead: bool = False, besides: int = -1) -> None:
        layer: Any = self.layers[index] if index < len(self.layers) else None
        there = layer is None or index in self._coming or index not in self._host or index == besides
        if there or (layer.keys is not None and layer.keys.numel()):
            return
        host = self._host[index]
        layer.keys, layer.values = torch.empty_like(host[0]), torch.empty_like(host[1])
        pairs = zip(host, (layer.keys, layer.values), strict=True)
        self._coming[index] = self._link.start("in", [self._move(kept, target) for kept, target in pairs])

    @staticmethod
    def _move(host: Tensor, device: Tensor) -> Move:
        return Move(MemoryRows(host.view(-1, host.shape[-1])), device.view(-1, device.shape[-1]))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens so far, wherever they lie."""
        return self._host[layer_idx][0].shape[-2] if layer_idx in self._host else 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Length and offset of the keys that a mask is for."""
        return self.get_seq_length(layer_idx) + query_length, 0


@dataclass
class Sample:
    """One generation.

    Parameters
    ----------
    tokens : Tensor
    seconds : list of float
        From token to token, the first steps left out.
    steps : list of StepRecord
        What MegaKV's offload engine did in them.
    bytes_in, bytes_out : int
        Over the link in all steps, per step.
    """

    tokens: Tensor
    seconds: list[float]
    steps: list[StepRecord] = field(default_factory=list)
    bytes_in: float = 0.0
    bytes_out: float = 0.0


class Decoder:
    """One method, ready to generate again and again.

    Parameters
    ----------
    method : str
    model : PreTrainedModel
        Shared with others; its weights are not copied.
    link_gb_s : float
    chunk_tokens : int
    **settings
        More of ``megakv.offload``.
    """

    def __init__(self, method: str, model: PreTrainedModel, *, link_gb_s: float, chunk_tokens: int, **settings: Any):
        self.method = method
        self._bytes_s = link_gb_s * 1e9
        self._engine: Any = None
        self._model: Any = model
        if method != OTHERS:
            offload = {"enabled": method != IN_MEMORY, "chunk_tokens": chunk_tokens, **SETTINGS}
            if method != IN_MEMORY:
                offload |= {"method": method, "emulated_link_gb_s": link_gb_s, **settings}
            self._engine = megakv.init_inference(twin(model), {"dtype": "fp32", "megakv": {"offload": offload}})

    def generate(self, ids: Tensor, new: int) -> Sample:
        """Greedy tokens for a batch of prompts."""
        clock = _Clock()
        options: dict[str, Any] = {
            "max_new_tokens": new,
            "do_sample": False,
            # Without a mask, tokens that happen to be OPT's padding would count as such.
            "attention_mask": torch.ones_like(ids),
            "stopping_criteria": StoppingCriteriaList([clock]),
        }
        if self._engine is None:
            return self._with_transformers(ids, clock, options)
        offloader = self._engine._offloader
        tokens = self._engine.generate(ids, **options)
        sample = Sample(tokens, self._between(clock))
        if offloader is not None:
            sample.steps = offloader.steps[WARM:]
            sample.bytes_in = sum(step.bytes_in for step in sample.steps) / len(sample.steps)
            sample.bytes_out = sum(step.bytes_out for step in sample.steps) / len(sample.steps)
        return sample

    def _with_transformers(self, ids: Tensor, clock: _Clock, options: dict[str, Any]) -> Sample:
        link = ThreadLink(self._bytes_s)
        tokens = self._model.generate(ids, past_key_values=EmulatedOffloadedCache(link), **options)
        link.close()
        sample = Sample(tokens, self._between(clock))
        # The prompt is sent back whole, once; the rest goes to the steps.
        prompt = link.traffic["out"].nbytes / (1 + sum(1 + n / ids.shape[1] for n in range(1, len(clock.times))))
        sample.bytes_in = link.traffic["in"].nbytes / (len(clock.times) - 1)
        sample.bytes_out = (link.traffic["out"].nbytes - prompt) / (len(clock.times) - 1)
        return sample

    @staticmethod
    def _between(clock: _Clock) -> list[float]:
        return [later - earlier for earlier, later in zip(clock.times, clock.times[1:], strict=False)][WARM:]

    @property
    def staging_bytes(self) -> int | None:
        """Bytes of buffers on the accelerator; None where nothing is offloaded by MegaKV."""
        offloader = None if self._engine is None else self._engine._offloader
        return None if offloader is None else offloader.staging_bytes

    def close(self) -> None:
        """Give everything back."""
        if self._engine is not None:
            self._engine.destroy()
