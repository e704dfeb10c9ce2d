"""Tiny models in folders, quantised as they are published: by the packages themselves where they write them, else by
hand.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BitsAndBytesConfig,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    PreTrainedConfig,
    Qwen3Config,
    TorchAoConfig,
)

GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 8}
PROMPT = torch.randint(3, 99, (1, 40), generator=torch.Generator().manual_seed(1))
WIDTHS: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.12,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": None,
}


def deepseek() -> PreTrainedConfig:
    """Latent attention, dense layers first, then experts that a checkpoint stores one by one."""
    ranks = {"q_lora_rank": 128, "kv_lora_rank": 96, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1}
    widths = WIDTHS | {"num_key_value_heads": 4, "moe_intermediate_size": 128, "first_k_dense_replace": 1}
    del widths["head_dim"]
    return DeepseekV3Config(**widths, **ranks, **experts)


def gpt_oss() -> PreTrainedConfig:
    """Experts in one, sinks and a window."""
    return GptOssConfig(**WIDTHS, num_local_experts=4, num_experts_per_tok=2, sliding_window=16)


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**WIDTHS),
    "qwen3": lambda: Qwen3Config(**WIDTHS),
    "deepseek_v3": deepseek,
    "gpt_oss": gpt_oss,
}


def families_of(kind: str) -> tuple[str, ...]:
    """Families of which tiny models are made in a format."""
    return {"mxfp4": ("gpt_oss",), "fp8 blocks": ("qwen3", "deepseek_v3")}.get(kind, ("llama", "qwen3"))


def plain_model(family: str, dtype: torch.dtype) -> Any:
    """The model before it is quantised."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(FAMILIES[family](), dtype=dtype).eval()


def reference(kind: str, family: str, folder: Path) -> list[int]:
    """Tokens of transformers' own run, or where it lacks a package, of weights that are unpacked here."""
    if kind in UNPACKED:
        model = plain_model(family, torch.float32)
        for module in model.model.layers.modules():
            if isinstance(module, torch.nn.Linear):
                codes, scale = _groups(module.weight.data)
                dense = (codes - 8) * scale.float().repeat_interleave(len(codes) // len(scale), 0)
                module.weight.data = dense.t().contiguous()
    elif kind == "hqq":
        return []
    else:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        found: list[int] = model.generate(PROMPT, **GREEDY)[0, PROMPT.shape[1] :].tolist()
    return found


def _by_transformers(config: Any) -> Callable[[str, Path], None]:
    """What a quantizer makes while it loads, saved by transformers."""

    def make(family: str, folder: Path) -> None:
        plain = folder.with_name(folder.name + "-plain")
        plain_model(family, torch.float32).save_pretrained(plain)
        model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=config(), dtype=torch.float32)
        model.save_pretrained(folder)

    return make


def _by_hand(
    settings: dict[str, Any], pack: Callable[[str, Tensor], dict[str, Tensor]], dtype: torch.dtype = torch.float32
) -> Callable[[str, Path], None]:
    """A plain checkpoint in which `pack` gives what takes the place of a linear's, or of all experts', weight."""

    def make(family: str, folder: Path) -> None:
        plain_model(family, dtype).save_pretrained(folder)
        stored = {}
        for key, value in load_file(folder / "model.safetensors").items():
            stored |= pack(key, value) if ".layers." in key and value.ndim > 1 else {key: value}
        write(folder, stored, quantization_config=settings)

    return make


def write(folder: Path, stored: dict[str, Tensor], **changes: Any) -> None:
    """Put other tensors into a folder, and other values into its config."""
    save_file({k: v.contiguous() for k, v in stored.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    described = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(described))


def fp8_blocks(key: str, weight: Tensor, block: int = 128) -> dict[str, Tensor]:
    """Values in FP8 with a scale for each square of them, as DeepSeek and Qwen publish; routers stay."""
    if key.endswith(("mlp.gate.weight", "e_score_correction_bias")):
        return {key: weight}
    rows, columns = (-(-size // block) for size in weight.shape)
    padded = torch.zeros(rows * block, columns * block)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    squares = padded.view(rows, block, columns, block)
    scale = squares.abs().amax((1, 3), keepdim=True).clamp_min(1e-12) / 448
    values = (squares / scale).view_as(padded)[: weight.shape[0], : weight.shape[1]]
    return {key: values.to(torch.float8_e4m3fn), f"{key}_scale_inv": scale[:, 0, :, 0]}


def mxfp4(key: str, weight: Tensor) -> dict[str, Tensor]:
    """Experts in four bits, by 32 with an exponent, as GPT-OSS is published."""
    if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {key: weight}
    groups = weight.mT.unflatten(-1, (-1, 32))
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    exponent = torch.ceil(torch.log2(groups.abs().amax(-1, keepdim=True).clamp_min(1e-9) / 6))
    scaled = groups / 2**exponent
    codes = (scaled.abs().unsqueeze(-1) - values).abs().argmin(-1) + 8 * (scaled < 0)
    blocks = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    return {f"{key}_blocks": blocks, f"{key}_scales": (exponent.squeeze(-1) + 127).to(torch.uint8)}


def _packed(codes: Tensor, dim: int, order: Any = range(8)) -> Tensor:
    """Eight numbers of four bits in one of 32, along a dimension."""
    eight = codes.to(torch.int64).movedim(dim, -1).unflatten(-1, (-1, 8))
    word = sum((eight[..., index] << (4 * place) for place, index in enumerate(order)), torch.zeros_like(eight[..., 0]))
    return word.where(word < 2**31, word - 2**32).to(torch.int32).movedim(-1, dim)


def _groups(weight: Tensor, size: int = 32) -> tuple[Tensor, Tensor]:
    """Numbers of four bits around 8 ``[in, out]``, and the scales of their groups ``[groups, out]``."""
    groups = weight.float().t().unflatten(0, (-1, size))
    scale = (groups.abs().amax(1) / 7).half()
    codes = (groups / scale[:, None].float()).round().clamp(-8, 7) + 8
    return codes.flatten(0, 1), scale


def gptq(key: str, weight: Tensor) -> dict[str, Tensor]:
    """As GPTQ stores a symmetric weight of four bits."""
    (codes, scale), base = _groups(weight), key.removesuffix("weight")
    zeros = torch.full(scale.shape, 7)
    index = (torch.arange(len(codes)) // 32).int()
    parts = {"qweight": _packed(codes, 0), "qzeros": _packed(zeros, 1), "scales": scale, "g_idx": index}
    return {base + name: part for name, part in parts.items()}


def awq(key: str, weight: Tensor) -> dict[str, Tensor]:
    """As AWQ stores a weight of four bits."""
    (codes, scale), base, order = _groups(weight), key.removesuffix("weight"), [0, 2, 4, 6, 1, 3, 5, 7]
    zeros = torch.full(scale.shape, 8)
    parts = {"qweight": _packed(codes, 1, order), "qzeros": _packed(zeros, 1, order), "scales": scale}
    return {base + name: part for name, part in parts.items()}


def _compressed(
    bits: int,
    strategy: str,
    group: int | None = None,
    kind: str = "int",
    form: str = "pack-quantized",
    *,
    dynamic: bool = False,
) -> Callable[[str, Path], None]:
    """What llm-compressor writes."""

    def make(family: str, folder: Path) -> None:
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import (
            QuantizationArgs,
            QuantizationConfig,
            QuantizationScheme,
            apply_quantization_config,
        )

        model = plain_model(family, torch.float32)
        weights = QuantizationArgs(num_bits=bits, type=kind, symmetric=True, strategy=strategy, group_size=group)
        inputs = QuantizationArgs(num_bits=bits, type=kind, symmetric=True, strategy="token", dynamic=True)
        scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=inputs if dynamic else None)
        config = QuantizationConfig(
            config_groups={"group_0": scheme}, ignore=["lm_head"], format=form, quantization_status="frozen"
        )
        apply_quantization_config(model, config)
        for module in model.modules():
            if hasattr(module, "weight_scale"):
                rows = module.weight.data.unflatten(-1, (-1, group or module.weight.shape[1]))
                top = 448.0 if kind == "float" else 2 ** (bits - 1) - 1
                module.weight_scale.data.copy_((rows.abs().amax(-1) / top).half().view_as(module.weight_scale))
        compressor = ModelCompressor.from_pretrained_model(model, quantization_format=form)
        compressor.compress_model(model)
        model.save_pretrained(folder)
        compressor.update_config(folder)

    return make


def _torchao(name: str, **settings: Any) -> Callable[[str, Path], None]:
    def config() -> TorchAoConfig:
        import torchao.quantization

        return TorchAoConfig(getattr(torchao.quantization, name)(**settings))

    return _by_transformers(config)


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "fmt": "e4m3"}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "desc_act": False,
    "sym": True,
    "checkpoint_format": "gptq",
}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
HQQ = {
    "quant_method": "hqq",
    "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 32}},
    "skip_modules": [],
}
# Outliers are found among the tokens that are computed together: with them an answer depends on the mesh.
INT8 = {"load_in_8bit": True, "llm_int8_threshold": 0.0}
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": torch.float32}

UNPACKED = ("gptq", "awq")
"""Formats for which transformers needs packages that are not installed for tests."""
MAKERS: dict[str, Callable[[str, Path], None]] = {
    "fp8 blocks": _by_hand(FP8, fp8_blocks),
    "mxfp4": _by_hand(MXFP4, mxfp4),
    "compressed-tensors w8a16": _compressed(8, "channel"),
    "compressed-tensors w4a16": _compressed(4, "group", 32),
    "compressed-tensors w8a8 int8": _compressed(8, "channel", form="int-quantized", dynamic=True),
    "compressed-tensors w8a8 fp8": _compressed(8, "channel", kind="float", form="float-quantized", dynamic=True),
    "torchao int8": _torchao("Int8WeightOnlyConfig", version=2),
    "torchao float8": _torchao("Float8WeightOnlyConfig"),
    "bitsandbytes int8": _by_transformers(lambda: BitsAndBytesConfig(**INT8)),
    "bitsandbytes nf4": _by_transformers(lambda: BitsAndBytesConfig(**NF4)),
    "bitsandbytes nf4 twice": _by_transformers(lambda: BitsAndBytesConfig(**NF4, bnb_4bit_use_double_quant=True)),
    "hqq": _by_hand(HQQ, lambda key, weight: {key: weight}),
    "gptq": _by_hand(GPTQ, gptq),
    "awq": _by_hand(AWQ, awq),
}
