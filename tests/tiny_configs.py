"""A tiny configuration of every causal language model that the installed transformers knows, by shrinking its own."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

LAYERS = 3
VOCAB = 99
LARGEST = 20_000_000
"""Parameters beyond which a configuration does not count as tiny."""


def _sizes(value: int | float | None, names: str) -> dict[str, int | float | None]:
    return dict.fromkeys(names.split(), value)


SIZES: dict[str, Any] = {
    **_sizes(64, "hidden_size d_model n_embd dim emb_dim embedding_size embedding_dim word_embed_proj_dim lru_width"),
    **_sizes(64, "input_embedding_size output_embedding_size"),
    **_sizes(96, "intermediate_size ffn_dim n_inner ffn_hidden_size decoder_ffn_dim encoder_ffn_dim feed_forward_size"),
    **_sizes(96, "dim_ff dff d_inner intermediate_size_mlp dense_intermediate_size prefix_dense_intermediate_size"),
    **_sizes(96, "shared_intermediate_size"),
    **_sizes(4, "num_attention_heads n_head n_heads num_heads attention_heads decoder_attention_heads"),
    **_sizes(4, "encoder_attention_heads num_decoder_attention_heads num_encoder_attention_heads index_n_heads"),
    **_sizes(4, "swa_num_attention_heads indexer_n_heads linear_num_value_heads"),
    **_sizes(2, "num_key_value_heads num_kv_heads swa_num_key_value_heads num_query_groups linear_num_key_heads"),
    **_sizes(2, "linear_num_heads num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts"),
    **_sizes(16, "head_dim global_head_dim swa_head_dim v_head_dim qk_nope_head_dim attention_head_dim d_head"),
    **_sizes(16, "kv_channels linear_key_head_dim linear_value_head_dim linear_head_dim mamba_d_head mamba_head_dim"),
    **_sizes(16, "mamba_headdim index_head_dim indexer_head_dim dim_head attention_head_size mamba_chunk_size"),
    **_sizes(16, "chunk_size hidden_size_per_layer_input"),
    **_sizes(24, "kv_lora_rank q_lora_rank o_lora_rank qk_head_dim"),
    **_sizes(32, "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size"),
    **_sizes(32, "shared_experts_intermediate_size expert_ffn_hidden_size"),
    **_sizes(4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    **_sizes(1, "n_group topk_group num_expert_group n_shared_experts num_shared_experts moe_num_shared_experts"),
    **_sizes(1, "mamba_n_groups mamba_ngroups n_groups num_kv_shared_layers"),
    **_sizes(VOCAB, "vocab_size vocab_size_per_layer_input audio_vocab_size encoder_hash_byte_group_vocab"),
    **_sizes(256, "max_position_embeddings n_positions n_ctx max_seq_len original_max_position_embeddings"),
    **_sizes(256, "max_target_positions max_source_positions model_max_length context_length"),
    **_sizes(8, "sliding_window attention_window_size window_size sliding_window_size keep_window_size"),
    **_sizes(256, "attention_chunk_size"),
    **_sizes(8, "mamba_d_state ssm_state_size state_size mamba_dt_rank time_step_rank"),
    **_sizes(8, "mamba_n_heads mamba_num_heads n_mamba_heads qk_rope_head_dim rotary_dim index_topk laurel_rank"),
    **_sizes(0.15, "initializer_range init_std"),
    "mamba_d_ssm": 128,
    "dropout": 0.0,
    "use_cache": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
COUNTS = (
    "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_decoder_layers num_encoder_layers"
).split()
KINDS = ("layer_types", "layers_block_type", "mlp_layer_types")
"""What says of each layer which kind it is of; a configuration also makes it up by itself."""
NOT_SETTINGS = ("model_type", "transformers_version", "architectures", "id2label", "label2id")
MLA = {"head_dim": 8, "num_key_value_heads": 4}
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {"head_dim": 24, "swa_head_dim": 24},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"]},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "output_gate_type": "sigmoid",
        "hc_lowrank": 16,
        "layer_types": ["linear_attention", "indexed_attention", "indexed_attention"],
    },
    "reformer": {
        "axial_pos_embds_dim": (32, 32),
        "axial_pos_shape": (16, 16),
        "attn_layers": ["local", "lsh", "local"],
    },
    "rwkv": {"attention_hidden_size": 64},
    "xlstm": {"qk_dim_factor": 1.0},
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
        "n_mamba_heads": 2,
    },
    "zamba2": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "hybrid_layer_ids": [1, 3],
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "num_key_value_heads": 4,
    },
    "zaya": {"num_experts_per_tok": 1},
}
"""What a family needs beside smaller sizes."""

FAMILIES: dict[str, type[PreTrainedConfig]] = {family.model_type: family for family in MODEL_FOR_CAUSAL_LM_MAPPING}


def tiny_config(model_type: str) -> PreTrainedConfig:
    """A configuration with `LAYERS` layers, of every kind that the family has, as far as they fit.

    Raises
    ------
    Exception
        Whatever the family says to its smaller sizes.
    """
    family = FAMILIES[model_type]
    whole = {name: value for name, value in family().to_dict().items() if name not in NOT_SETTINGS}
    failure: Exception | None = None
    for left_out in ((), KINDS):
        settings = {**_shrunk(whole, left_out), **OWN.get(model_type, {})}
        if "is_decoder" in settings:
            settings["is_decoder"] = True
        try:
            config = family(**settings)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except Exception as error:  # the first way that works will do
            failure = failure or error
            continue
        size = sum(parameter.numel() for parameter in model.parameters())
        assert size <= LARGEST, f"{model_type}: {size} parameters"
        return config
    assert failure is not None
    raise failure


def _shrunk(settings: dict[str, Any], left_out: tuple[str, ...]) -> dict[str, Any]:
    count = next((settings[name] for name in COUNTS if isinstance(settings.get(name), int)), 0)
    small: dict[str, Any] = {}
    for name, value in settings.items():
        if name in left_out:
            continue
        if name == "per_layer_config":
            small[name] = {}
        elif isinstance(value, dict) and name != "rope_parameters":
            small[name] = _shrunk(value, left_out)
        elif name in COUNTS and isinstance(value, int):
            small[name] = LAYERS
        elif isinstance(value, list) and len(value) == count > LAYERS:
            kinds = [kind for index, kind in enumerate(value) if kind not in value[:index]][:LAYERS]
            small[name] = kinds + [value[-1]] * (LAYERS - len(kinds))
        elif name in MLA and "qk_rope_head_dim" in settings:
            small[name] = MLA[name]
        elif name in SIZES and not isinstance(value, list) and (value is not None or name in TOKENS):
            small[name] = SIZES[name]
        else:
            small[name] = value
    return {**small, **OWN.get(settings.get("model_type", ""), {})}
