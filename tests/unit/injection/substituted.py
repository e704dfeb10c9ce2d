"""Tiny models of the families that bypass the attention interface, run on shuffled packed tokens in one process."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from megakv.attention.partial import PartialAttention, Scoring
from megakv.cache.cache import ShardedCache
from megakv.distributed.sharding import TokenBlock, new_tokens
from megakv.injection.ownership import attach
from tests.families import VOCAB, bloom, falcon, falcon_alibi, falcon_mqa, gpt_j, mpt

LAYERS = 2
CONFIGS = {
    "falcon": falcon,
    "falcon_mqa": falcon_mqa,
    "falcon_71_heads": lambda: falcon(
        multi_query=True, new_decoder_architecture=False, num_kv_heads=None, num_attention_heads=71, hidden_size=284
    ),
    "falcon_alibi": falcon_alibi,
    "falcon_alibi_12_heads": lambda: changed(falcon_alibi(), num_attention_heads=12, num_kv_heads=12, hidden_size=96),
    "falcon_alibi_shared_kv": lambda: falcon(alibi=True),
    "gpt_j": gpt_j,
    "bloom": bloom,
    "bloom_12_heads": lambda: changed(bloom(), n_head=12, hidden_size=96),
    "mpt": mpt,
    "mpt_12_heads_clipped": lambda: changed(
        mpt(), n_heads=12, d_model=96, attn_config={"clip_qkv": 0.6, "softmax_scale": 0.4}
    ),
}
ALIBI = [name for name in CONFIGS if "alibi" in name or "bloom" in name or "mpt" in name]


def changed(config: PreTrainedConfig, **changes: Any) -> PreTrainedConfig:
    return type(config)(**{**config.to_dict(), **changes})


def plain_model(name: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> PreTrainedModel:
    """transformers' default attention of the family (Falcon's eager one would count ALiBi twice)."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(dtype)


class DenseRuntime:
    """Attends each sequence over all it has seen, whatever the order in which its tokens lie in the packed row."""

    def __init__(self) -> None:
        self.tokens: list[TokenBlock] = []
        self.memory: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def attend(
        self, layer: int, q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, scoring: Scoring, sinks: Tensor | None
    ) -> Tensor:
        assert sinks is None
        self.memory.setdefault(layer, []).append((k_BKSD[0], v_BKSD[0]))
        keys, values = (torch.cat(rows, dim=1) for rows in zip(*self.memory[layer], strict=True))
        new = self.tokens[-1]
        sequence, slot, position = (
            np.concatenate([getattr(block, field) for block in self.tokens])
            for field in ("sequence", "slot", "position")
        )
        result = q_BHSD.new_zeros(q_BHSD.shape[1], q_BHSD.shape[2], v_BKSD.shape[3])
        for row in range(new.batch):
            rows = np.flatnonzero(new.sequence == row)
            rows = rows[np.argsort(new.slot[rows])]
            seen = np.flatnonzero(sequence == row)
            seen = seen[np.argsort(slot[seen])]
            if len(rows):
                partial = PartialAttention(q_BHSD[0][:, rows], new.slot[rows], scoring, values.shape[-1])
                partial.add(keys[:, seen], values[:, seen], slot[seen], position[seen])
                result[:, rows] = partial.out.to(result.dtype)
        return result.transpose(0, 1)[None]


class Substituted:
    """A copy of a model with MegaKV's attention, fed shuffled packed tokens."""

    def __init__(self, model: PreTrainedModel):
        self.model = copy.deepcopy(model)
        self.runtime = DenseRuntime()
        assert attach(self.model, self.runtime.attend) == LAYERS
        self.cache = ShardedCache(LAYERS, size=1, rank=0)
        self.by_mask = model.config.model_type == "bloom" or getattr(model.config, "alibi", False)
        self.mask = np.ones((1, 0), dtype=bool)

    @torch.no_grad()
    def __call__(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        past, length = self.cache.length, ids.shape[1]
        new_mask = np.ones(ids.shape, dtype=bool) if mask is None else mask[:, -length:].numpy().astype(bool)
        self.mask = np.concatenate([np.broadcast_to(self.mask, (len(ids), past)), new_mask], axis=1)
        slots = np.broadcast_to(np.arange(past + length), self.mask.shape)
        positions = np.maximum(np.cumsum(self.mask, axis=1) - 1, 0) if self.by_mask else slots
        block = new_tokens(new_mask, positions[:, past:], past)
        order = np.random.default_rng(3).permutation(len(block))
        block = TokenBlock(block.sequence[order], block.slot[order], block.position[order], block.batch)
        self.runtime.tokens.append(block)
        rows = torch.from_numpy(block.sequence), torch.from_numpy(block.slot - past)
        inputs: dict[str, Any] = {"input_ids": ids[rows][None], "past_key_values": self.cache, "use_cache": True}
        if self.model.config.model_type in ("falcon", "gptj"):
            inputs["position_ids"] = torch.from_numpy(block.position)[None]
        packed = self.model(**inputs).logits[0]
        self.cache.length = past + length
        logits = packed.new_zeros(*ids.shape, packed.shape[-1])
        logits[rows] = packed
        return logits


def random_ids(batch: int, length: int) -> Tensor:
    return torch.randint(3, VOCAB, (batch, length))


def relative_error(got: Tensor, wanted: Tensor) -> float:
    return float((got - wanted).abs().max() / wanted.abs().max())
