"""Bench-size models with random weights, several modules over the same weights, and caches that need no prompt."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, FalconConfig, LlamaConfig, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from megakv.cache.cache import ShardedCache
from megakv.distributed.layouts import balanced
from megakv.distributed.sharding import new_tokens

from .world import World

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def model_config(arguments: argparse.Namespace, *, positions: int = 1) -> PreTrainedConfig:
    """A Llama, or a Falcon (``family``: attention and MLP in parallel), of the command line's shape."""
    common = {"num_hidden_layers": arguments.layers, "hidden_size": arguments.hidden, "vocab_size": arguments.vocab}
    common |= {"num_attention_heads": arguments.heads, "max_position_embeddings": positions}
    kv_heads, intermediate = arguments.kv_heads, arguments.intermediate
    if getattr(arguments, "family", "llama") == "falcon":
        own = {"num_kv_heads": kv_heads, "ffn_hidden_size": intermediate, "new_decoder_architecture": True}
        return FalconConfig(**common, **own)
    own = {"num_key_value_heads": kv_heads, "intermediate_size": intermediate}
    return LlamaConfig(**common, **own, head_dim=getattr(arguments, "head_dim", None))


def words_of(arguments: argparse.Namespace) -> str:
    """The model and the ranks of a command line, for a chart's subtitle."""
    heads = f"{arguments.heads} query heads"
    if isinstance(arguments.kv_heads, int):
        heads = f"{arguments.heads} query and {arguments.kv_heads} KV heads"
    family = getattr(arguments, "family", "llama").capitalize()
    shape = f"{family}, {arguments.layers} layers of {arguments.hidden}, {heads}, {arguments.dtype}"
    return f"{shape}, {arguments.threads} thread(s) a rank; median, 95% interval"


def random_model(arguments: argparse.Namespace, *, positions: int, device: torch.device) -> PreTrainedModel:
    """It with random weights, the same on every rank."""
    return drawn_model(model_config(arguments, positions=positions), DTYPES[arguments.dtype]).to(device)


def drawn_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Random weights, the same in every process, for transformers' own fastest attention."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def random_ids(vocab: int, length: int, device: torch.device, batch: int = 1) -> Tensor:
    """``[B, S]`` random prompts, the same on every rank."""
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(1)).to(device)


def weight_bytes(model: nn.Module) -> int:
    return sum(weight.nbytes for weight in model.parameters())


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """A second module over the same weights: either may replace its parameters, neither may write to them."""
    shared = {id(weight): nn.Parameter(weight.detach(), requires_grad=False) for weight in model.parameters()}
    return copy.deepcopy(model, shared)


def without_stop(model: PreTrainedModel) -> PreTrainedModel:
    """Let `generate` go on whatever the tokens: with random weights any may come."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


# Caches of random keys and values, the same on every rank, that decoding begins with


def random_layers(model: PreTrainedModel, batch: int, tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """``[B, K, S, D]`` keys and values of each layer, the same on every rank."""
    config, generator = model.config, torch.Generator().manual_seed(2)
    shape = (batch, config.num_key_value_heads, tokens, config.hidden_size // config.num_attention_heads)
    for _ in range(config.num_hidden_layers):
        keys, values = (torch.randn(shape, generator=generator).to(model.device, model.dtype) for _ in range(2))
        yield keys, values


def begin_whole(cache: ShardedCache, size: int, batch: int, tokens: int) -> None:
    """Let a cache begin a pass of so many tokens, load-balanced over `size` ranks."""
    positions = np.broadcast_to(np.arange(tokens), (batch, tokens))
    cache.begin(balanced(new_tokens(np.ones((batch, tokens), dtype=bool), positions, 0), size), batch)


def sharded_cache(model: PreTrainedModel, world: World, *, batch: int, tokens: int) -> ShardedCache:
    """This rank's share of such a cache, load-balanced as after one prefill of all tokens."""
    cache = ShardedCache(model.config.num_hidden_layers, size=world.size, rank=world.rank)
    if tokens == 0:
        return cache
    begin_whole(cache, world.size, batch, tokens)
    for layer, (keys, values) in enumerate(random_layers(model, batch, tokens)):
        for sequence in range(batch):
            slots = torch.from_numpy(cache.table.slots(world.rank, sequence)).to(model.device)
            if len(slots):
                cache.store(layer).append(sequence, keys[sequence][:, slots], values[sequence][:, slots])
    cache.commit(tokens)
    return cache


class RoomyLayer(DynamicLayer):
    """A layer with room for further tokens: they are written in place, where `DynamicLayer` copies all it holds."""

    def __init__(self, keys: Tensor, values: Tensor, room: int):
        super().__init__()
        self.lazy_initialization(keys, values)
        self._held = keys.shape[2]
        self._whole = [
            torch.cat([each, each.new_empty(*each.shape[:2], room, each.shape[3])], 2) for each in (keys, values)
        ]

    def first(self) -> list[Tensor]:
        """``[B, K, S, D]`` what it held at first, in its own memory."""
        return [whole[:, :, : self._held] for whole in self._whole]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start = self.keys.shape[2]
        end = start + key_states.shape[2]
        for whole, new in zip(self._whole, (key_states, value_states), strict=True):
            whole[:, :, start:end] = new
        self.keys, self.values = (whole[:, :, :end] for whole in self._whole)
        return self.keys, self.values


class RewoundCache(Cache):
    """Layers that begin, again and again, with what roomy ones held at first: these themselves, or growing ones."""

    def __init__(self, layers: list[Any], source: list[RoomyLayer]):
        super().__init__(layers=layers)
        self._source = source
        self.rewind()

    def rewind(self) -> None:
        for layer, source in zip(self.layers, self._source, strict=True):
            layer.lazy_initialization(*source.first())
            layer.keys, layer.values = source.first()


def single_caches(model: PreTrainedModel, *, batch: int, tokens: int, room: int) -> tuple[RewoundCache, RewoundCache]:
    """Over the same memory: one that writes new tokens in place, and transformers' own, which copies all it holds."""
    roomy = [RoomyLayer(*pair, room) for pair in random_layers(model, batch, tokens)]
    return RewoundCache(roomy, roomy), RewoundCache([DynamicLayer() for _ in roomy], roomy)
