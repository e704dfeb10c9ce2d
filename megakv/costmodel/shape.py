"""Sizes of a model that its cost depends on, from its transformers config: no weights are read."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.initialization import no_init_weights

from megakv.attention.latent import expanding_pays
from megakv.base.errors import MegaKVError
from megakv.costmodel.config_sizes import (
    biased,
    experts,
    feed_forward_width,
    head_dims,
    kept_rotary,
    positions,
    windows,
)
from megakv.weights.folder import local_directory, model_class, read_config
from megakv.weights.gguf import SUFFIX
from megakv.weights.placement import head_counts

if TYPE_CHECKING:
    from megakv.weights.formats.sizes import PackedBits

LOG_SUM_EXP_COLUMNS = 1
"""A partial output travels with its log-sum-exp: one more column beside the head dimension."""


@dataclass(frozen=True)
class AttentionShape:
    """Attention of one layer on one rank."""

    heads: int  # Query and KV heads of this rank (after tensor parallelism).
    kv_heads: int
    key_dim: int  # Head dimensions of queries and keys, and of values.
    value_dim: int
    element_bytes: int  # Bytes of an element of Q, K and V.
    window: int | None = None  # A query sees that many slots, itself included; None: all.
    # ``math`` where a soft cap or a position bias keeps GPUs' fused kernels out.
    kernel: Literal["flash", "math"] = "flash"
    # Bytes of an element of partial outputs. None: float32, or float64 for elements of 8 bytes, as MegaKV has them;
    # other systems keep them in the type of Q.
    partial_bytes: int | None = None
    row_dim: int | None = None  # Elements of a token that are cached and travel; None: keys and values of all heads.
    latent: int | None = None  # How many of those are a latent, which is expanded into the heads.

    @cached_property
    def head_dim(self) -> int:
        """The larger one of both dimensions, which attention kernels go by."""
        return max(self.key_dim, self.value_dim)

    @cached_property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return max(1, self.heads // self.kv_heads)

    @cached_property
    def absorbed(self) -> AttentionShape:
        """The same for few queries, which latents are not expanded for: all heads share one KV head."""
        if self.latent is None:
            return self
        return replace(self, kv_heads=1, key_dim=self.row_dim or 0, value_dim=self.latent, latent=None)

    def of_pass(self, new: Sequence[int], cached: Sequence[int], size: int) -> AttentionShape:
        """As a pass over new tokens of sequences attends on a ring of that size: latents expanded or absorbed."""
        pays = self.latent and expanding_pays(self.latent, self._own_dim, self.value_dim, new, cached, size)
        return self if pays else self.absorbed

    @property
    def _own_dim(self) -> int:
        """Of a head's keys, the columns that are made from latents."""
        return self.key_dim - (self.row_dim or 0) + (self.latent or 0)

    @property
    def expansion(self) -> int:
        """Weights that a row of latents is multiplied with to become heads' keys and values."""
        return (self.latent or 0) * self.heads * (self._own_dim + self.value_dim)

    @property
    def query_row_bytes(self) -> int:
        return self.heads * self.key_dim * self.element_bytes

    @property
    def kv_row_bytes(self) -> int:
        return (self.row_dim or self.kv_heads * (self.key_dim + self.value_dim)) * self.element_bytes

    @property
    def partial_row_bytes(self) -> int:
        """Bytes of one token's partial output and log-sum-exp."""
        return self.heads * (self.value_dim + LOG_SUM_EXP_COLUMNS) * (self.partial_bytes or max(4, self.element_bytes))


@dataclass(frozen=True)
class LayerShape:
    """Weights of one decoder layer, in elements."""

    dense: int  # Those that every token uses.
    experts: int = 0  # Of all routed experts together.
    n_experts: int = 1  # Routed experts, and how many a token uses; 1 and 1 in a dense layer.
    active_experts: int = 1
    window: int | None = None  # The attention window of the layer.
    fp8: int = 0  # How many of `dense` are row-wise FP8, one byte each.
    fp8_experts: bool = False  # Whether all of `experts` are.

    def multiplied(self, tokens: float) -> float:
        return tokens * (self.dense + self.experts * self.active_experts / self.n_experts)

    def touched(self, tokens: float) -> float:
        """Elements read from memory: of the experts those that any token chose, choices taken as independent."""
        missed: float = (1.0 - self.active_experts / self.n_experts) ** tokens
        return self.dense + self.experts * (1.0 - missed)


@dataclass(frozen=True)
class ModelShape:
    """A causal language model as the cost model sees it."""

    hidden: int  # Widths; `intermediate` is that of the feed-forward, of one expert where there are several.
    intermediate: int
    vocab: int
    heads: int  # Attention heads of the whole model.
    kv_heads: int
    key_dim: int  # Head dimensions.
    value_dim: int
    layers: tuple[LayerShape, ...]
    embedding: int  # Elements outside the layers: embeddings, head, norms.
    dtype: torch.dtype  # Of weights and cache.
    kernel: Literal["flash", "math"] = "flash"  # As in `AttentionShape`.
    partial_bytes: int | None = None  # As in `AttentionShape`.
    # Whether norms with residuals, rotary embeddings and gates are one kernel each, and what lies between them needs no
    # memory of its own: as other systems have them, and MegaKV on processors, see `megakv.injection.prompt_layer`.
    fused: bool = False
    positions: int | None = None  # Tokens that a sequence may have; None: the config does not say.
    row_dim: int | None = None  # As in `AttentionShape`, and its `latent`.
    latent: int | None = None
    packed: PackedBits | None = None  # Where weights are in blocks of few bits; None: in `dtype`, or FP8.
    rotary: int = 0  # Elements that are kept beside a token's activations, see `megakv.injection.recomputation`.

    @classmethod
    def from_config(cls, config: PreTrainedConfig, *, dtype: torch.dtype | None = None) -> ModelShape:
        """Sizes of the model that a config describes, in its own type unless given; or a ValueError."""
        n_layers, heads, kv_heads = head_counts(config)
        text = config.get_text_config()
        key_dim, value_dim = head_dims(text, heads)
        latent = getattr(text, "kv_lora_rank", None)
        if latent:
            kv_heads = heads
        chosen = dtype or getattr(text, "dtype", None) or torch.float32
        layers, total = _layer_shapes(config, n_layers)
        return cls(
            hidden=text.hidden_size,
            intermediate=feed_forward_width(text, experts=any(layer.experts for layer in layers)),
            vocab=text.vocab_size,
            heads=heads,
            kv_heads=kv_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            layers=layers,
            embedding=total - sum(layer.dense + layer.experts for layer in layers),
            dtype=chosen,
            kernel="math" if biased(text) else "flash",
            positions=positions(text),
            row_dim=latent + text.qk_rope_head_dim if latent else None,
            latent=latent or None,
            rotary=kept_rotary(text, key_dim),
        )

    @classmethod
    def from_path(cls, path: str | Path, *, dtype: torch.dtype | None = None) -> ModelShape:
        """Sizes of the model of a directory, hub id or config file; a ValueError if there is no such config."""
        try:
            config_file = Path(path).is_file() and Path(path).suffix != SUFFIX
            directory = Path(path) if config_file else local_directory(path, weights=False)
            config = read_config(directory)
        except (ValueError, MegaKVError) as error:
            raise ValueError(f"no model config in {str(path)!r}: {error}") from error
        from megakv.weights.formats.sizes import bits_in

        shape = cls.from_config(config, dtype=dtype)
        return replace(shape, packed=None if config_file else bits_in(directory, shape.element_bytes))

    @property
    def element_bytes(self) -> int:
        return self.dtype.itemsize

    @property
    def input_bytes(self) -> int:
        """Bytes of a token's activations as a layer keeps them to recompute keys and values."""
        return (self.hidden + self.rotary) * self.element_bytes

    @property
    def cached_heads(self) -> int:
        """KV heads as they are cached: latents are one."""
        return self.kv_heads if self.latent is None else 1

    @cached_property
    def parameters(self) -> int:
        return self.embedding + sum(layer.dense + layer.experts for layer in self.layers)

    @cached_property
    def weight_bytes(self) -> int:
        if self.packed is not None:
            return self.outside_bytes + round((self.parameters - self.embedding) * self.packed.layers / 8)
        in_fp8 = sum(layer.fp8 + layer.experts * layer.fp8_experts for layer in self.layers)
        return self.parameters * self.element_bytes - in_fp8 * (self.element_bytes - 1)

    @property
    def outside_bytes(self) -> int:
        """Those of embeddings and the output head."""
        return round(self.embedding * (8 * self.element_bytes if self.packed is None else self.packed.outside) / 8)

    @cached_property
    def attention_elements(self) -> int:
        """Weights of one layer's attention: projections to and from queries, keys and values of full rank."""
        projections = self.heads * (self.key_dim + self.value_dim) + self.kv_heads * (self.key_dim + self.value_dim)
        return min(self.hidden * projections, *(layer.dense for layer in self.layers))

    @cached_property
    def feed_forward_tensors(self) -> int:
        """Tensors of the feed-forward's width at its peak: activation, gate and product; without a gate two."""
        layer = max(self.layers, key=lambda each: each.experts)
        elements = layer.experts / layer.n_experts if layer.experts else layer.dense - self.attention_elements
        return 3 if elements > 2.5 * self.hidden * self.intermediate else 2

    def with_fp8_feed_forward(self) -> ModelShape:
        """The same model with row-wise FP8 weights in its feed-forward layers (``megakv.weights.format``: ``fp8``)."""
        fp8 = (replace(each, fp8=each.dense - self.attention_elements, fp8_experts=True) for each in self.layers)
        return replace(self, layers=tuple(fp8))

    @cached_property
    def layer_kinds(self) -> tuple[tuple[int, int], ...]:
        """One layer's index for every kind of layer, and how many there are of it."""
        return tuple((self.layers.index(kind), count) for kind, count in Counter(self.layers).items())

    def attention(self, *, tp_size: int = 1, layer: int = 0) -> AttentionShape:
        """A layer on the rank with the most heads; KV heads are copied where TP exceeds them."""
        heads, kv_heads = local_heads(self.heads, self.kv_heads, tp_size)
        return AttentionShape(
            heads=heads,
            kv_heads=kv_heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            element_bytes=self.element_bytes,
            window=self.layers[layer].window,
            kernel=self.kernel,
            partial_bytes=self.partial_bytes,
            row_dim=self.row_dim,
            latent=self.latent,
        )


def local_heads(heads: int, kv_heads: int, tp_size: int) -> tuple[int, int]:
    """Query and KV heads of the tensor-parallel rank that has most."""
    return -(-heads // tp_size), -(-kv_heads // tp_size)


def _layer_shapes(config: PreTrainedConfig, n_layers: int) -> tuple[tuple[LayerShape, ...], int]:
    """Weights of every layer, counted on a model without memory, and elements of the whole model."""
    with torch.device("meta"), no_init_weights():
        # An engine's config may name an attention that only its own modules have; that of the copy is another.
        model = model_class(config)._from_config(copy.deepcopy(config), attn_implementation="eager")
    model.tie_weights()
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == n_layers]
    if not lists:
        raise ValueError(f"model type {config.model_type!r} has no list of {n_layers} decoder layers")
    text = config.get_text_config()
    n_experts, active = experts(text)
    layers = []
    for layer, window in zip(lists[0], windows(text, n_layers), strict=True):
        routed = sum(p.numel() for name, p in layer.named_parameters() if ".experts." in f".{name}")
        dense = sum(p.numel() for p in layer.parameters()) - routed
        layers.append(
            LayerShape(dense, routed, n_experts, active, window) if routed else LayerShape(dense, window=window)
        )
    return tuple(layers), sum(p.numel() for p in model.parameters())
