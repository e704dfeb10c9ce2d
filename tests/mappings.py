"""Mappings of KV heads to ranks, with heads and their copies anywhere."""

import random

from megakv.cache.layer import LayerMapping
from megakv.fairkv.mapping import HeadMapping, by_rank


def mapping_of(layers: list[list[list[int]]], tp_size: int) -> HeadMapping:
    """A mapping with the ranks of each KV head of each layer."""
    ones = (1.0,) * tp_size
    return HeadMapping(
        model="random",
        tp_size=tp_size,
        n_kv_heads=len(layers[0]),
        copies=max(sum(map(len, ranks)) - len(ranks) for ranks in layers),
        split="free",
        objective="barrier",
        mapping=tuple(by_rank(LayerMapping.even(ranks), tp_size) for ranks in layers),
        bound=0.0,
        barrier_utilisation=1.0,
        efficiency=1.0,
        loads=(ones,) * len(layers),
        rank_loads=ones,
        busy_rates=ones,
    )


def random_ranks(kv_heads: int, tp_size: int) -> list[list[int]]:
    """Ranks of every KV head of a layer: mostly one to three of them, and no rank without a head."""
    ranks = [random.sample(range(tp_size), min(tp_size, random.choice((1, 1, 2, 3)))) for _ in range(kv_heads)]
    for rank in {*range(tp_size)} - {rank for held in ranks for rank in held}:
        random.choice(ranks).append(rank)
    return ranks


def random_mapping(layers: int, kv_heads: int, tp_size: int) -> HeadMapping:
    """Another placement in every layer, with at least one copied head in the last."""
    found = [random_ranks(kv_heads, tp_size) for _ in range(layers)]
    while tp_size > 1 and not any(len(held) > 1 for held in found[-1]):
        found[-1] = random_ranks(kv_heads, tp_size)
    return mapping_of(found, tp_size)
