"""Which attention heads live on which tensor-parallel rank, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from transformers import PreTrainedConfig

from megakv.base.errors import CombinationError


@dataclass(frozen=True)
class HeadGroup:
    """A KV head, by its index in the whole model, with those of its query heads that live beside it.

    All of them, or a part where other ranks hold copies of the KV head.
    """

    kv_head: int
    query_heads: tuple[int, ...]


@dataclass(frozen=True)
class HeadShard:
    """The heads of one layer on one rank, in the order in which the rank's tensors hold them."""

    groups: tuple[HeadGroup, ...]

    @property
    def kv_heads(self) -> tuple[int, ...]:
        """Global index of each local KV head."""
        return tuple(group.kv_head for group in self.groups)

    @property
    def query_heads(self) -> tuple[int, ...]:
        """Global index of each local query head, group after group."""
        return tuple(head for group in self.groups for head in group.query_heads)

    @property
    def group_size(self) -> int | None:
        """Query heads per KV head, or None where groups differ in size."""
        sizes = {len(group.query_heads) for group in self.groups}
        return sizes.pop() if len(sizes) == 1 else None


@dataclass(frozen=True)
class HeadMap:
    """A placement of all heads of a model on its tensor-parallel ranks: ``layers[layer][rank]`` is a `HeadShard`.

    Any assignment is possible: uneven counts, another one in every layer, and copies of a KV head on several ranks. Its
    query heads are either divided among these, or all on each of them: such replicas share the head's tokens.
    """

    n_heads: int
    n_kv_heads: int
    layers: tuple[tuple[HeadShard, ...], ...]

    def whole_copies(self, layer: int) -> dict[int, tuple[int, ...]]:
        """Query heads of the KV heads of a layer that several ranks hold, each with the same of them."""
        found: dict[int, list[tuple[int, ...]]] = {}
        for shard in self.layers[layer]:
            for group in shard.groups:
                found.setdefault(group.kv_head, []).append(group.query_heads)
        return {head: same[0] for head, same in found.items() if len(same) > 1 and len(set(same)) == 1}

    def first_here(self, layer: int, rank: int) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
        """Of a rank's query heads, and of its KV heads, which no rank before it holds: over ranks, every head once."""
        before = self.layers[layer][:rank]
        queries = {head for shard in before for head in shard.query_heads}
        keys = {head for shard in before for head in shard.kv_heads}
        here = self.shard(layer, rank)
        return tuple(head not in queries for head in here.query_heads), tuple(
            head not in keys for head in here.kv_heads
        )

    @property
    def tp_size(self) -> int:
        """Number of tensor-parallel ranks."""
        return len(self.layers[0]) if self.layers else 1

    def shard(self, layer: int, rank: int) -> HeadShard:
        """The heads of `layer` on `rank`."""
        return self.layers[layer][rank]


def _divides(n_heads: int, n_kv_heads: int, tp_size: int) -> bool:
    if n_heads % tp_size:
        return False
    return n_kv_heads % tp_size == 0 or tp_size % n_kv_heads == 0


def tensor_parallel_sizes(n_heads: int, n_kv_heads: int) -> list[int]:
    """The degrees that split these heads."""
    return [size for size in range(1, n_heads + 1) if _divides(n_heads, n_kv_heads, size)]


def contiguous_head_map(n_layers: int, n_heads: int, n_kv_heads: int, tp_size: int) -> HeadMap:
    """Equal runs of neighbouring heads; with more ranks than KV heads each KV head is copied and its queries divided.

    A `ValueError` where `tp_size` fits neither way names the head counts and the sizes that do.
    """
    if n_heads % n_kv_heads:
        raise ValueError(f"{n_heads} query heads cannot share {n_kv_heads} KV heads evenly")
    if tp_size < 1 or not _divides(n_heads, n_kv_heads, tp_size):
        sizes = tensor_parallel_sizes(n_heads, n_kv_heads)
        raise CombinationError(
            "whole",
            f"tensor_parallel.tp_size = {tp_size} cannot split {n_heads} query heads over {n_kv_heads} KV heads; "
            f"sizes that can: {', '.join(map(str, sizes))}",
        )
    group, count = n_heads // n_kv_heads, n_heads // tp_size
    runs = (groupby(range(first, first + count), lambda head: head // group) for first in range(0, n_heads, count))
    shards = tuple(HeadShard(tuple(HeadGroup(kv, tuple(heads)) for kv, heads in run)) for run in runs)
    return HeadMap(n_heads, n_kv_heads, (shards,) * n_layers)


def head_counts(config: PreTrainedConfig) -> tuple[int, int, int]:
    """Layers, query heads and KV heads of a text model."""
    text = config.get_text_config()
    layers = getattr(text, "num_hidden_layers", None)
    heads = getattr(text, "num_attention_heads", None)
    if not isinstance(layers, int) or not isinstance(heads, int):
        raise ValueError(f"model type {config.model_type!r} is not supported: its config names no attention heads")
    if text.model_type == "falcon":
        own = text.num_kv_heads if text.new_decoder_architecture else heads
        return layers, heads, 1 if text.multi_query and not text.new_decoder_architecture else own
    if getattr(text, "kv_lora_rank", None):
        # Latents, which all heads share.
        return layers, heads, 1
    return layers, heads, getattr(text, "num_key_value_heads", None) or heads
