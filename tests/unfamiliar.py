"""A causal language model that transformers and DeepSpeed do not know: a Llama whose parts have names of their own."""

from typing import Any

from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb, eager_attention_forward

ROWS = ("mixer.mix_out", "shrink")
"""Its row-parallel linears."""


class UnfamiliarConfig(LlamaConfig):
    model_type = "unfamiliar"


class MixAttention(nn.Module):
    """Llama's, by other names, and with its last linear in front."""

    def __init__(self, config: UnfamiliarConfig, layer_idx: int):
        super().__init__()
        self.config, self.layer_idx, self.width = config, layer_idx, config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        wide, narrow = config.num_attention_heads * self.width, config.num_key_value_heads * self.width
        self.mix_out = nn.Linear(wide, config.hidden_size, bias=False)
        self.offer, self.ask, self.carry = (
            nn.Linear(config.hidden_size, n, bias=False) for n in (narrow, wide, narrow)
        )

    def forward(self, hidden: Tensor, turns: tuple[Tensor, Tensor], mask: Any, past: Any, **more: Any) -> Tensor:
        q, k, v = (
            f(hidden).unflatten(-1, (-1, self.width)).transpose(1, 2) for f in (self.ask, self.offer, self.carry)
        )
        q, k = apply_rotary_pos_emb(q, k, *turns)
        if past is not None:
            k, v = past.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        return self.mix_out(attend(self, q, k, v, mask, scaling=self.width**-0.5, **more)[0].flatten(2))


class MixLayer(GradientCheckpointingLayer):
    """Attention and a gated feed-forward, whose linears are the layer's own."""

    def __init__(self, config: UnfamiliarConfig, index: int):
        super().__init__()
        self.shrink = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.first, self.second = (LlamaRMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(2))
        self.mixer = MixAttention(config, index)
        self.open, self.widen = (nn.Linear(config.hidden_size, config.intermediate_size, bias=False) for _ in range(2))

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Any = None,
        past_key_values: Any = None,
        position_embeddings: Any = None,
        **more: Any,
    ) -> Tensor:
        mixed = self.mixer(self.first(hidden_states), position_embeddings, attention_mask, past_key_values, **more)
        hidden = hidden_states + mixed
        inner = self.second(hidden)
        return hidden + self.shrink(nn.functional.silu(self.open(inner)) * self.widen(inner))


class UnfamiliarForCausalLM(LlamaForCausalLM):
    config_class = UnfamiliarConfig

    def __init__(self, config: UnfamiliarConfig):
        super().__init__(config)
        self.model = LlamaModel(config)
        self.model.layers = nn.ModuleList(MixLayer(config, index) for index in range(config.num_hidden_layers))
        self.post_init()


def unfamiliar() -> UnfamiliarConfig:
    """A tiny one."""
    sizes = {"vocab_size": 199, "hidden_size": 64, "intermediate_size": 97, "num_hidden_layers": 2}
    heads = {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    return UnfamiliarConfig(**sizes, **heads, initializer_range=0.15)
