"""Bench-size models with random weights, and several modules over the same weights."""

from __future__ import annotations

import argparse
import copy

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, FalconConfig, LlamaConfig, PreTrainedConfig, PreTrainedModel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def model_config(arguments: argparse.Namespace, *, positions: int = 1) -> PreTrainedConfig:
    """A Llama, or a Falcon (``family``: attention and MLP in parallel), of the command line's shape."""
    common = {
        "num_hidden_layers": arguments.layers,
        "hidden_size": arguments.hidden,
        "num_attention_heads": arguments.heads,
        "vocab_size": arguments.vocab,
        "max_position_embeddings": positions,
    }
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
    return f"{shape}, {arguments.threads} thread(s) a rank"


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
