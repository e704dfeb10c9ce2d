"""Bench-size models with random weights, and several modules over the same weights."""

from __future__ import annotations

import argparse
import copy

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, FalconConfig, LlamaConfig, PreTrainedConfig, PreTrainedModel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def random_llama(arguments: argparse.Namespace, *, positions: int, device: torch.device) -> PreTrainedModel:
    """A Llama with random weights, the same on every rank, for transformers' own fastest attention."""
    return _random(llama_config(arguments, positions=positions), arguments, device)


def llama_config(arguments: argparse.Namespace, *, positions: int) -> LlamaConfig:
    """The Llama of `random_llama`."""
    return LlamaConfig(
        num_hidden_layers=arguments.layers,
        hidden_size=arguments.hidden,
        num_attention_heads=arguments.heads,
        num_key_value_heads=arguments.kv_heads,
        head_dim=getattr(arguments, "head_dim", None),
        intermediate_size=arguments.intermediate,
        vocab_size=arguments.vocab,
        max_position_embeddings=positions,
    )


def _random(config: PreTrainedConfig, arguments: argparse.Namespace, device: torch.device) -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[arguments.dtype], attn_implementation="sdpa")
    return model.to(device).eval().requires_grad_(False)


def random_falcon(arguments: argparse.Namespace, *, positions: int, device: torch.device) -> PreTrainedModel:
    """A Falcon (new decoder: attention and MLP in parallel, an MLP of two layers) otherwise as `random_llama`."""
    return _random(falcon_config(arguments, positions=positions), arguments, device)


def falcon_config(arguments: argparse.Namespace, *, positions: int) -> FalconConfig:
    """The Falcon of `random_falcon`."""
    return FalconConfig(
        num_hidden_layers=arguments.layers,
        hidden_size=arguments.hidden,
        num_attention_heads=arguments.heads,
        num_kv_heads=arguments.kv_heads,
        ffn_hidden_size=arguments.intermediate,
        vocab_size=arguments.vocab,
        max_position_embeddings=positions,
        new_decoder_architecture=True,
    )


def random_ids(vocab: int, length: int, device: torch.device, batch: int = 1) -> Tensor:
    """``[B, S]`` random prompts, the same on every rank."""
    return torch.randint(0, vocab, (batch, length), generator=torch.Generator().manual_seed(1)).to(device)


def weight_bytes(model: nn.Module) -> int:
    """Bytes of a module's weights in this process."""
    return sum(weight.nbytes for weight in model.parameters())


def twin(model: PreTrainedModel) -> PreTrainedModel:
    """A second module with a config of its own over the same weights in the same memory.

    Either may replace its parameters, even the tensors in them, without the other noticing; neither may write to them.
    """
    shared = {id(weight): nn.Parameter(weight.detach(), requires_grad=False) for weight in model.parameters()}
    return copy.deepcopy(model, shared)


MODELS = {"llama": random_llama, "falcon": random_falcon}
CONFIGS = {"llama": llama_config, "falcon": falcon_config}
