"""Tiny configurations of every model family the project promises, one callable each.

Sizes are odd on purpose (vocabulary, MLP width, head dimensions that are not hidden / heads) and the initialiser is
wide, so that attention is far from uniform and a wrong head, mask or rotation shows in the logits. Expert widths stay
multiples of 4: torch's grouped matmul wants strides of 16 bytes.
"""

from collections.abc import Callable
from typing import Any

from transformers import (
    BloomConfig,
    CohereConfig,
    DeepseekV3Config,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4Config,
    GPTJConfig,
    GPTNeoXConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    MptConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    Starcoder2Config,
)

HEADS = 8
HIDDEN = 64
LAYERS = 2
MAX_POSITIONS = 4096
VOCAB = 199
WINDOW = 24

_TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
_BASE: dict[str, Any] = {
    **_TOKENS,
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.15,
}
_GQA: dict[str, Any] = {**_BASE, "num_key_value_heads": 4, "intermediate_size": 97}


def llama(**changes: Any) -> LlamaConfig:
    """Llama with grouped queries (8 query, 4 KV heads)."""
    return LlamaConfig(**{**_GQA, **changes})


def llama_tied() -> LlamaConfig:
    """Llama whose output head is its input embedding."""
    return llama(tie_word_embeddings=True, num_key_value_heads=2)


def llama_mqa() -> LlamaConfig:
    """Llama with a single KV head: TP must copy it."""
    return llama(num_key_value_heads=1)


def llama_mha() -> LlamaConfig:
    """Llama whose query heads each have a KV head of their own, as in Llama 2."""
    return llama(num_key_value_heads=HEADS)


def llama_dynamic_rope() -> LlamaConfig:
    """Frequencies change once the sequence passes 64 tokens: transformers takes that from max_position_embeddings."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    return llama(rope_parameters=rope, max_position_embeddings=64)


def llama3_rope() -> LlamaConfig:
    """Llama 3.1's frequency-dependent scaling."""
    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return llama(rope_parameters=rope)


def mistral() -> MistralConfig:
    """Mistral with a sliding window in every layer and a head dimension of its own."""
    return MistralConfig(**_GQA, sliding_window=WINDOW, head_dim=12)


def mixtral() -> MixtralConfig:
    """Mixtral: 4 experts, 2 per token."""
    return MixtralConfig(**{**_GQA, "intermediate_size": 44}, num_local_experts=4, num_experts_per_tok=2)


def qwen2() -> Qwen2Config:
    """Qwen2: biases on q, k and v only."""
    return Qwen2Config(**_GQA)


def qwen3() -> Qwen3Config:
    """Qwen3: norms over each head's q and k."""
    return Qwen3Config(**_GQA, head_dim=16)


def qwen3_moe() -> Qwen3MoeConfig:
    """Qwen3-MoE: one dense layer, one layer of 6 experts, 2 per token."""
    return Qwen3MoeConfig(
        **_GQA,
        head_dim=16,
        moe_intermediate_size=36,
        num_experts=6,
        num_experts_per_tok=2,
        mlp_only_layers=[0],
        norm_topk_prob=True,
    )


def opt() -> OPTConfig:
    """OPT: learned positions with an offset of two, biases everywhere, tied."""
    return OPTConfig(
        **_TOKENS,
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        word_embed_proj_dim=HIDDEN,
        ffn_dim=131,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=MAX_POSITIONS,
        init_std=0.15,
        dropout=0.0,
    )


def falcon(**changes: Any) -> FalconConfig:
    """Falcon's new decoder (40B): groups of heads fused as [K, G + 2, D], two norms in parallel."""
    settings = {
        **_BASE,
        "num_kv_heads": 4,
        "new_decoder_architecture": True,
        "parallel_attn": True,
        "alibi": False,
        "bias": False,
        "ffn_hidden_size": 131,
    }
    return FalconConfig(**{**settings, **changes})


def falcon_mqa() -> FalconConfig:
    """Falcon 7B: one KV head, attention and MLP in parallel."""
    return falcon(multi_query=True, new_decoder_architecture=False, num_kv_heads=None)


def falcon_alibi() -> FalconConfig:
    """Falcon-RW 1B: ALiBi, all heads with their own KV, biases, attention and MLP one after the other."""
    return falcon(
        alibi=True, multi_query=False, new_decoder_architecture=False, parallel_attn=False, bias=True, num_kv_heads=None
    )


def gpt_neox() -> GPTNeoXConfig:
    """GPT-NeoX: q, k, v fused per head, partial rotary, parallel residual."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return GPTNeoXConfig(**_BASE, intermediate_size=131, rope_parameters=rope)


def gpt_j() -> GPTJConfig:
    """GPT-J: interleaved partial rotary, parallel residual."""
    return GPTJConfig(
        **_TOKENS,
        vocab_size=VOCAB,
        n_positions=MAX_POSITIONS,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        rotary_dim=4,
        n_inner=131,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=0.15,
    )


def bloom() -> BloomConfig:
    """BLOOM: ALiBi, q, k, v fused per head, tied; it has no limit on positions."""
    return BloomConfig(
        **_TOKENS, vocab_size=VOCAB, hidden_size=HIDDEN, n_layer=LAYERS, n_head=HEADS, initializer_range=0.15
    )


def mpt() -> MptConfig:
    """MPT: ALiBi, q, k, v concatenated, tied."""
    return MptConfig(
        **_TOKENS,
        vocab_size=VOCAB,
        d_model=HIDDEN,
        n_layers=LAYERS,
        n_heads=HEADS,
        max_seq_len=MAX_POSITIONS,
        initializer_range=0.15,
        use_cache=True,
    )


def gemma() -> GemmaConfig:
    """Gemma: scaled embeddings, norms with weight 1 + w, tied."""
    return GemmaConfig(**_GQA, head_dim=12)


def gemma2() -> Gemma2Config:
    """Gemma 2: soft-capped scores and logits, a sliding window in every other layer."""
    return Gemma2Config(
        **_GQA,
        head_dim=12,
        query_pre_attn_scalar=12,
        sliding_window=WINDOW,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=30.0,
    )


def gemma3() -> Gemma3TextConfig:
    """Gemma 3 (text): two rotary bases, a norm over each head's q and k, two sliding layers and a full one."""
    return Gemma3TextConfig(
        **{**_GQA, "num_hidden_layers": 3},
        head_dim=12,
        query_pre_attn_scalar=12,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )


def phi() -> PhiConfig:
    """Phi-2: partial rotary, biases, attention and MLP in parallel, a bias on the output head."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return PhiConfig(**_GQA, rope_parameters=rope, resid_pdrop=0.0)


def phi3(**changes: Any) -> Phi3Config:
    """Phi-3: q, k, v concatenated in one linear, gate and up in another."""
    return Phi3Config(**{**_GQA, "original_max_position_embeddings": MAX_POSITIONS, **changes})


def phi3_longrope() -> Phi3Config:
    """Phi-3 long: other frequencies once the sequence passes 64 tokens."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.05, 1.1, 1.2],
        "long_factor": [1.0, 1.5, 3.0, 8.0],
        "original_max_position_embeddings": 64,
    }
    return phi3(rope_parameters=rope, original_max_position_embeddings=64)


def cohere() -> CohereConfig:
    """Command R+: norms with a weight per head and dimension on q and k, parallel residual, scaled logits, tied."""
    return CohereConfig(**_GQA, use_qk_norm=True, logit_scale=0.25)


def starcoder2() -> Starcoder2Config:
    """StarCoder2: biases everywhere, a sliding window, a plain two-layer MLP, tied."""
    return Starcoder2Config(**_GQA, sliding_window=WINDOW, use_bias=True, residual_dropout=0.0, embedding_dropout=0.0)


def glm4() -> Glm4Config:
    """GLM-4: partial interleaved rotary, four norms a layer, gate and up fused, 2 KV heads."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    return Glm4Config(**{**_GQA, "num_key_value_heads": 2}, head_dim=12, rope_parameters=rope)


def smollm3() -> SmolLM3Config:
    """SmolLM3: the second layer has no rotary embedding, tied."""
    return SmolLM3Config(**_GQA, no_rope_layers=[1, 0])


def olmo2() -> Olmo2Config:
    """OLMo 2: norms over all heads of q and k at once, after the projections."""
    return Olmo2Config(**_GQA)


def deepseek_v3() -> DeepseekV3Config:
    """DeepSeek-V3: latent attention, a dense layer, then experts chosen by groups beside a shared one."""
    return DeepseekV3Config(
        **{**_BASE, "num_key_value_heads": HEADS},
        intermediate_size=97,
        moe_intermediate_size=36,
        n_shared_experts=1,
        n_routed_experts=6,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=24,
        kv_lora_rank=20,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=10,
    )


def gpt_oss() -> GptOssConfig:
    """GPT-OSS: attention sinks, alternating windows, experts with biases and a clamped activation."""
    return GptOssConfig(
        **{**_GQA, "intermediate_size": 44},
        head_dim=12,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )


FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    family.__name__: family
    for family in (
        llama,
        llama_tied,
        llama_mqa,
        llama_dynamic_rope,
        llama3_rope,
        mistral,
        mixtral,
        qwen2,
        qwen3,
        qwen3_moe,
        opt,
        falcon,
        falcon_mqa,
        falcon_alibi,
        gpt_neox,
        gpt_j,
        bloom,
        mpt,
        gemma,
        gemma2,
        gemma3,
        phi,
        phi3,
        phi3_longrope,
        cohere,
        starcoder2,
        glm4,
        smollm3,
        olmo2,
        deepseek_v3,
        gpt_oss,
    )
}

# Not walked by every test, and asked for by name: all that is new in them is a number of heads.
CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {**FAMILIES, "llama_mha": llama_mha}

# Their own attention adds biases made for all heads: only MegaKV's in its place can run on a rank's share of the heads.
NEEDS_SUBSTITUTE = ("falcon_alibi", "bloom", "mpt")
