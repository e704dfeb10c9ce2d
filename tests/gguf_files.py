"""GGUF files of tiny models with random weights, in any type: written by the `gguf` package as llama.cpp names them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    GGML_QUANT_SIZES,
    MODEL_ARCH,
    GGMLQuantizationType,
    GGUFWriter,
    TokenType,
    get_tensor_name_map,
)
from gguf.quants import quantize
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3MoeConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

VOCAB = 199
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "initializer_range": 0.08,
    "bos_token_id": 0,
    "eos_token_id": None,
    "pad_token_id": None,
}
K_HALVES = {"Q4_K": (2.8e-4, 2.1e-3), "Q5_K": (1.4e-4, 2.1e-3), "Q6_K": (6e-5,)}
"""Scales and offsets of random blocks, for weights of about 0.08."""


def config_of(family: str, hidden: int = 256, **changes: Any) -> PreTrainedConfig:
    """A family whose sizes are whole blocks."""
    sizes = {**SIZES, "hidden_size": hidden, "intermediate_size": 2 * hidden, **changes}
    if family == "gemma2":
        return Gemma2Config(**sizes, head_dim=hidden // 8, sliding_window=24, query_pre_attn_scalar=hidden // 8)
    if family == "qwen3_moe":
        return Qwen3MoeConfig(**sizes, head_dim=hidden // 8, num_experts=4, num_experts_per_tok=2,
                              moe_intermediate_size=64, norm_topk_prob=True)  # fmt: skip
    return {"llama": LlamaConfig, "qwen2": Qwen2Config}[family](**sizes)


def write_gguf(
    path: Path,
    config: PreTrainedConfig,
    kind: str,
    *,
    seed: int = 0,
    kinds: Mapping[str, str] | None = None,
    per_part: int = 0,
    keys: Mapping[str, Any] | None = None,
    leave_out: str = "",
) -> Path:
    """A file of random weights, matrices in `kind`, or in what `kinds` has for a part of their names.

    It is split after every `per_part` tensors; `keys` are more metadata. Returns the file, or the first part.
    """
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    arch = {"llama": "llama", "qwen2": "qwen2", "gemma2": "gemma2", "qwen3_moe": "qwen3moe"}[config.model_type]
    writer = GGUFWriter(path, arch, split_max_tensors=per_part)
    _describe(writer, config, arch)
    for key, value in (keys or {}).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
        add[type(value)](key, value)
    names = get_tensor_name_map(MODEL_ARCH[arch.upper()], config.num_hidden_layers)
    state, rng = dict(model.state_dict()), np.random.default_rng(seed)
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    for name, tensor in state.items():
        base = name.removesuffix(".weight").removesuffix(".bias")
        if base.endswith(".experts.gate_up_proj"):
            gate, up = tensor.chunk(2, dim=1)
            stem = names.get_name(base.removesuffix(".experts.gate_up_proj") + ".gate").removesuffix("gate_inp")
            found = {f"{stem}gate_exps.weight": gate, f"{stem}up_exps.weight": up}
        elif base.endswith(".experts.down_proj"):
            stem = names.get_name(base.removesuffix(".experts.down_proj") + ".gate").removesuffix("gate_inp")
            found = {f"{stem}down_exps.weight": tensor}
        else:
            found = {names.get_name(base) + name[len(base) :]: _stored(name, tensor, config)}
        for stored, values in found.items():
            wanted = next((each for part, each in (kinds or {}).items() if part in stored), kind)
            if not leave_out or leave_out not in stored:
                _add(writer, stored, values.contiguous().numpy(), wanted, rng)
    if config.rope_parameters["rope_type"] == "llama3":
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
        plain = config.rope_parameters["rope_theta"] ** -(torch.arange(len(scaled)) / len(scaled))
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path if path.exists() else min(path.parent.glob(f"{path.stem}-00001-of-*.gguf"))


def _describe(writer: GGUFWriter, config: Any, arch: str) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if arch == "gemma2":
        writer.add_key_length(config.head_dim)
        writer.add_sliding_window(config.sliding_window)
    if arch == "qwen3moe":
        writer.add_key_length(config.head_dim)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_tokenizer_model("gpt2")
    tokens = ["<end>", *"abcdefghijklmnopqrstuvwxyz", "ab"]
    writer.add_token_list([*tokens, *(f"t{number}" for number in range(config.vocab_size - len(tokens)))])
    writer.add_token_types([TokenType.CONTROL, *[TokenType.NORMAL] * (config.vocab_size - 1)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)


def _stored(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """A tensor as llama.cpp's converter writes it."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    head = next((count for part, count in heads.items() if part in name), None)
    if config.model_type == "llama" and head is not None:
        halves = tensor.reshape(head, 2, tensor.shape[0] // head // 2, *tensor.shape[1:])
        return halves.transpose(1, 2).reshape(tensor.shape)
    return tensor + 1 if config.model_type.startswith("gemma") and "norm" in name else tensor


def _add(writer: GGUFWriter, name: str, values: np.ndarray, kind: str, rng: np.random.Generator) -> None:
    if values.ndim == 1 or "gate_inp" in name:
        writer.add_tensor(name, values)
        return
    raw = GGMLQuantizationType[kind]
    packed = random_blocks(values.shape, kind, rng) if kind in K_HALVES else quantize(values, raw)
    writer.add_tensor(name, packed, raw_dtype=raw)


def random_blocks(shape: tuple[int, ...], kind: str, rng: np.random.Generator) -> np.ndarray:
    """Bytes of a K-quant, which the package does not write itself."""
    elements, nbytes = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    blocks = rng.integers(0, 256, (*shape[:-1], shape[-1] // elements, nbytes), dtype=np.uint8)
    for number, half in enumerate(K_HALVES[kind]):
        first = 208 if kind == "Q6_K" else 2 * number
        halves = np.float16(half * rng.uniform(0.5, 1, blocks.shape[:-1]))
        blocks[..., first : first + 2] = halves[..., None].view(np.uint8)
    return blocks.reshape(*shape[:-1], -1)
