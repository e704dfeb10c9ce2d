"""What a pass over several caches takes: new tokens of each, ragged, and settings that can be served."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megakv.cache.cache import ShardedCache
from megakv.cache.joined import JoinedCache
from megakv.engine.config import MegaKVConfig

Tokens = Sequence[int] | Tensor
"""Of one sequence, in a tensor of one dimension or any other way."""


def check_serves(config: MegaKVConfig, *, length_dependent: bool) -> None:
    """Refuse to serve several sequences with settings that cannot, by the name of the first of them.

    `length_dependent` is as in `ModelTraits`.
    """
    partition = config.megakv.runahead.partition
    if not isinstance(partition, str) and sum(partition) > 1 and all(isinstance(part, int) for part in partition):
        raise ValueError(
            f"megakv.runahead.partition = {partition}: token counts are of one prompt, and chunks of many have others; "
            "give fractions, 'auto' or 'even'"
        )
    if length_dependent:
        raise ValueError(
            "the model's rope_scaling follows the longest sequence of a pass (dynamic or longrope), so that sequences "
            "would change one another; serve a model with another rope_type"
        )


def joint_input(
    caches: Sequence[ShardedCache], tokens: Sequence[Tokens], like: ShardedCache, vocabulary: int
) -> dict[str, Any]:
    """A model's arguments for new tokens ``[B, T]`` of the caches, padded on the right, which it wants the last logits
    of.

    A ValueError where caches are not of one sequence each, of an engine whose own are `like` that one, or tokens no
    tokens.
    """
    if not caches or len(caches) != len(tokens):
        raise ValueError(f"{len(caches)} caches with new tokens of {len(tokens)}: one list of tokens for each, please")
    if len({id(cache) for cache in caches}) < len(caches):
        raise ValueError("a cache is given twice: fork it, for each sequence goes on in a cache of its own")
    mesh = like.size, like.rank, len(like)
    for index, cache in enumerate(caches):
        if (cache.size, cache.rank, len(cache)) != mesh or cache.batch_size not in (-1, 1) or cache.holds_compressed:
            raise ValueError(
                f"caches[{index}] is not of one uncompressed sequence on this mesh; make one with engine.new_cache()"
            )
    rows = _checked(tokens, vocabulary)
    lengths = np.array([len(row) for row in rows])
    real = np.arange(lengths.max()) < lengths[:, None]
    ids = np.zeros(real.shape, dtype=np.int64)
    ids[real] = np.concatenate(rows)
    return {
        "input_ids": torch.from_numpy(ids),
        "attention_mask": None if real.all() else torch.from_numpy(real),
        "past_key_values": JoinedCache(caches),
        "use_cache": True,
        "logits_to_keep": 1,
    }


def own_input(
    caches: Sequence[ShardedCache], tokens: Sequence[Tokens], vocabulary: int, *, turn: bool
) -> dict[str, Any]:
    """The same for new tokens of one cache in a pass of its own, perhaps of a `turn` that is compressed at its end.

    A ValueError where there is not one, or it is not of that kind.
    """
    if turn and not all(cache.compresses for cache in caches):
        raise ValueError(
            "a turn is of a cache that compresses: make it with engine.new_cache() where megakv.fairkv.budget is set"
        )
    if len(caches) != 1 or len(tokens) != 1:
        raise ValueError(
            f"{len(caches)} caches with new tokens of {len(tokens)}: give one of each, for caches that are compressed "
            "or offloaded, or have mapped KV heads, go through passes of their own"
        )
    (row,) = _checked(tokens, vocabulary)
    return {
        "input_ids": torch.from_numpy(row.astype(np.int64))[None],
        "past_key_values": caches[0],
        "use_cache": True,
        "logits_to_keep": 1,
    }


def _checked(tokens: Sequence[Tokens], vocabulary: int) -> list[np.ndarray]:
    rows = [np.asarray(each.cpu() if isinstance(each, Tensor) else each) for each in tokens]
    whole = [row.ndim == 1 and row.size > 0 and row.dtype.kind in "iu" for row in rows]
    if all(whole) and _in_vocabulary(np.concatenate(rows), vocabulary):
        return rows
    for index, row in enumerate(rows):
        if not whole[index] or not _in_vocabulary(row, vocabulary):
            raise ValueError(f"tokens[{index}] must be one or more token ids below {vocabulary}, in one dimension")
    return rows


def _in_vocabulary(ids: np.ndarray, vocabulary: int) -> bool:
    return bool(ids.min() >= 0 and ids.max() < vocabulary)
