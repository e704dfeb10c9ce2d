"""Cutting an attention module by heads."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from transformers import PreTrainedConfig

from megakv.weights.placement.heads import HeadMap, HeadShard
from megakv.weights.placement.slices import WHOLE, SliceSpec, blocks, joined

SEPARATE = ("q_proj", "k_proj", "v_proj")
FUSED = ("query_key_value", "qkv_proj", "Wqkv")
OUTPUTS = ("o_proj", "out_proj", "dense")
QUERY_NORMS = ("q_norm", "q_layernorm")
KEY_NORMS = ("k_norm", "k_layernorm")


def refusal(module: nn.Module, model_type: str, why: str) -> ValueError:
    """The error for an architecture that tensor parallelism would get wrong."""
    return ValueError(
        f"tensor_parallel.tp_size > 1 is not supported for model type {model_type!r}: {type(module).__name__} {why}; "
        "use tensor_parallel.tp_size = 1 with megakv.context_parallel.size > 1"
    )


def find_attention(layer: nn.Module, model_type: str) -> tuple[str, nn.Module]:
    """Name and module of a decoder layer's attention; refused if there is not exactly one that can be cut by heads."""
    found = [
        (name, module)
        for name, module in layer.named_modules()
        if any(isinstance(getattr(module, child, None), nn.Linear) for child in (SEPARATE[0], *FUSED))
        and any(isinstance(getattr(module, child, None), nn.Linear) for child in OUTPUTS)
    ]
    if len(found) != 1 or not found[0][0]:
        raise refusal(layer, model_type, f"has {len(found)} attention modules that can be split by heads")
    return found[0]


class AttentionCut:
    """The parts of one attention module's parameters on one rank, which keeps the heads of `shard`.

    Of the module, the whole one, only names and shapes are looked at.
    """

    def __init__(self, module: nn.Module, config: PreTrainedConfig, heads: HeadMap, shard: HeadShard):
        self.module, self.config, self.heads, self.shard = module, config.get_text_config(), heads, shard
        output = next(name for name in OUTPUTS if isinstance(getattr(module, name, None), nn.Linear))
        self.output = output
        self.fused = next((name for name in FUSED if isinstance(getattr(module, name, None), nn.Linear)), None)
        width = getattr(module, "head_dim", None) or getattr(module, "head_size", None)
        self.head_dim = width or self._linear(output).in_features // heads.n_heads

    def _linear(self, name: str) -> nn.Linear:
        linear = getattr(self.module, name, None)
        if not isinstance(linear, nn.Linear):
            raise self._refusal(f"has no linear {name}")
        return linear

    def _refusal(self, why: str) -> ValueError:
        return refusal(self.module, self.config.model_type, why)

    def specs(self) -> dict[str, SliceSpec]:
        """The part of every parameter, by its name inside the module; refused where it is not known to be right when
        cut."""
        if self.fused is None:
            outputs = self._separate()
        else:
            outputs = {self.fused: self._fused(self.fused)}
        specs: dict[str, SliceSpec] = {}
        for name, parameter in self.module.named_parameters():
            owner, _, kind = name.rpartition(".")
            if owner in outputs:
                specs[name] = outputs[owner]
            elif owner == self.output:
                columns = blocks(self.shard.query_heads, self._width(self.output, self.heads.n_heads, "in_features"))
                specs[name] = SliceSpec(1, columns) if kind == "weight" else WHOLE
            else:
                specs[name] = self._extra(name, tuple(parameter.shape))
        return specs

    def _extra(self, name: str, shape: tuple[int, ...]) -> SliceSpec:
        """Norms of queries and keys, and attention sinks."""
        owner = name.split(".")[0]
        for owners, count, kept in (
            (QUERY_NORMS, self.heads.n_heads, self.shard.query_heads),
            (KEY_NORMS, self.heads.n_kv_heads, self.shard.kv_heads),
        ):
            if owner in owners and shape == (self.head_dim,):
                return WHOLE
            if owner in owners and shape == (count, self.head_dim):
                return SliceSpec(0, blocks(kept, 1))
        if name == "sinks" and shape == (self.heads.n_heads,):
            return SliceSpec(0, blocks(self.shard.query_heads, 1))
        raise self._refusal(f"has a parameter {name} of shape {list(shape)} that cannot be split by heads")

    def _width(self, name: str, count: int, side: str) -> int:
        size = getattr(self._linear(name), side)
        if size != count * self.head_dim:
            raise self._refusal(f"has {name}.{side} = {size}, not {count} heads of {self.head_dim}")
        return self.head_dim

    def _separate(self) -> dict[str, SliceSpec]:
        counts = (self.heads.n_heads, self.heads.n_kv_heads, self.heads.n_kv_heads)
        kept = (self.shard.query_heads, self.shard.kv_heads, self.shard.kv_heads)
        return {
            name: SliceSpec(0, blocks(heads, self._width(name, count, "out_features")))
            for name, count, heads in zip(SEPARATE, counts, kept, strict=True)
        }

    def _fused(self, name: str) -> SliceSpec:
        layouts: dict[str, Callable[[], SliceSpec]] = {
            "gpt_neox": self._per_head,
            "bloom": self._per_head,
            "mpt": self._concatenated,
            "phi3": self._concatenated,
            "falcon": self._falcon,
        }
        layout = layouts.get(self.config.model_type)
        if layout is None:
            raise self._refusal(f"fuses queries, keys and values in {name} in an unknown order")
        total = self._linear(name).out_features
        expected = (self.heads.n_heads + 2 * self.heads.n_kv_heads) * self.head_dim
        if total != expected:
            raise self._refusal(f"has {name}.out_features = {total}, not {expected}")
        return layout()

    def _per_head(self) -> SliceSpec:
        """``[H, 3, D]``."""
        return SliceSpec(0, blocks(self.shard.query_heads, 3 * self.head_dim))

    def _concatenated(self) -> SliceSpec:
        """``[q | k | v]``."""
        D, H, K = self.head_dim, self.heads.n_heads, self.heads.n_kv_heads
        q = blocks(self.shard.query_heads, D)
        k = blocks(self.shard.kv_heads, D, H * D)
        v = blocks(self.shard.kv_heads, D, (H + K) * D)
        return SliceSpec(0, joined((*q, *k, *v)))

    def _falcon(self) -> SliceSpec:
        """``[K, G + 2, D]`` of the new decoder, ``[H, 3, D]``, or ``[H + 2, D]`` of multi-query: one form for all."""
        if self.shard.group_size is None:
            raise self._refusal("needs equally many query heads beside each KV head of a rank")
        D, group = self.head_dim, self.heads.n_heads // self.heads.n_kv_heads
        kept: list[tuple[int, int]] = []
        for part in self.shard.groups:
            base = part.kv_head * (group + 2)
            kept += [(base + head - part.kv_head * group, 1) for head in part.query_heads]
            kept.append((base + group, 2))
        return SliceSpec(0, joined((start * D, (start + count) * D) for start, count in kept))
