"""What a server asks of an engine, and what a pass over several caches takes: new tokens of each, ragged."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from deepspeed.inference.engine import InferenceEngine
from torch import Tensor
from transformers import PreTrainedModel

from megakv.base.errors import MegaKVError
from megakv.cache.cache import ShardedCache
from megakv.cache.joined import JoinedCache
from megakv.distributed.comm import Communicator
from megakv.distributed.mesh import Mesh
from megakv.engine.config import MegaKVConfig
from megakv.engine.generation import LengthLimits, check_tokens, check_vocabulary
from megakv.forward.pass_plan import LONGEST
from megakv.forward.runtime import Runtime
from megakv.injection.hooks import ForwardHooks
from megakv.injection.policy import RopeSides, forget_lengths, rope_sides

if TYPE_CHECKING:
    from megakv.offload.runtime import Offloader

Tokens = Sequence[int] | Tensor
"""Of one sequence, in a tensor of one dimension or any other way."""


class ServedEngine(InferenceEngine):
    """What a server asks of an engine, beside passes over caches (`MegaKVEngine.extend`)."""

    _config: MegaKVConfig
    _runtime: Runtime
    _comm: Communicator
    _limits: LengthLimits
    _offloader: Offloader | None
    _hooks: ForwardHooks | None
    module: PreTrainedModel

    @property
    def mesh(self) -> Mesh:
        """This rank's place among all ranks."""
        return self._comm.mesh

    def check_open(self) -> None:
        """Refuse to work after `destroy`."""
        if self._hooks is None:
            raise MegaKVError("this engine was destroyed; make a new one with megakv.init_inference")

    @cached_property
    def sides(self) -> RopeSides | None:
        """Sides of the model's original length, if its rotary frequencies follow the length: a pass is of one side."""
        return rope_sides(self.module)

    def _one_side(self, lengths: Sequence[int], longest: int) -> dict[str, int]:
        """The length that rotary embeddings go by in a pass over sequences of such lengths, as the hooks take it."""
        if self.sides is None:
            return {}
        if not longest and len({self.sides.of(length) for length in lengths}) > 1:
            raise ValueError(
                f"sequences of {', '.join(map(str, lengths))} tokens have different rotary frequencies, which follow "
                f"the length beyond {self.sides.original}: give each side passes of its own"
            )
        forget_lengths(self.module)
        return {LONGEST: longest}

    @property
    def compresses(self) -> bool:
        """Whether there is a budget for caches."""
        return self._runtime.compressor is not None

    @property
    def joins(self) -> bool:
        """Whether several caches can go through one pass: those that are not offloaded, without mapped KV heads."""
        return self._offloader is None and self._config.megakv.fairkv.mapping is None

    @property
    def cuts_compressed(self) -> bool:
        """Whether compressed caches can be cut back to before a step: not where each step evicts."""
        return self._config.megakv.fairkv.decode_interval is None

    @property
    def most_mixed(self) -> float:
        """Tokens up to which a pass of prompts and single ones takes less than one of each, by the last layers."""
        assert self._hooks is not None
        return self._hooks.most_mixed

    @property
    def gives_spans(self) -> bool:
        """Whether caches that are not compressed give what `ShardedCache.span` takes out: none with copies of heads."""
        return self._runtime.replicas is None

    @property
    def kv_bits(self) -> tuple[int, int] | None:
        """Bits and groups that offloaded keys and values are rounded to; None where they keep their type."""
        offload = self._config.megakv.offload
        return None if not offload.enabled or offload.kv_bits is None else (offload.kv_bits, offload.kv_group)

    @property
    def kv_device(self) -> torch.device:
        """Where caches lie, of whose memory what is kept of them takes more."""
        return self.mesh.device if self._offloader is None else torch.device("cpu")

    def room(self, cache: ShardedCache, sequences: int) -> int | None:
        """For how many tokens of so many sequences, over all ranks, this rank's tiers have room, given a cache that has
        some; None where caches lie on the device.
        """
        if self._offloader is None:
            return None
        room, own = self._offloader.room(cache, sequences), int(cache.table.counts()[self.mesh.cp_rank].sum())
        # Where partitions are uneven, one rank may come to hold nearly all tokens.
        return room * cache.length // max(1, own) if self._runtime.planner.spreads_evenly else room

    def check_serves(self) -> None:
        """Refuse settings with which `extend` cannot work, by a ValueError that names the setting."""
        self.check_open()
        assert self._hooks is not None
        partition = self._config.megakv.runahead.partition
        if not isinstance(partition, str) and sum(partition) > 1 and all(isinstance(part, int) for part in partition):
            raise ValueError(
                f"megakv.runahead.partition = {partition}: token counts are of one prompt, and chunks of many have "
                "others; give fractions, 'auto' or 'even'"
            )
        # Says what of a model cannot be served, if it is such a one.
        _ = self.sides

    def check_length(self, prompt: int, new: int) -> None:
        """Refuse a prompt of so many tokens, and new ones behind it, that `extend` has no room for: a ValueError."""
        self._limits.check(prompt, {"max_new_tokens": new})
        # The last new token is not computed itself.
        self._limits.check(prompt + new - 1, {"max_new_tokens": 0})

    def new_cache(self, *, forgets: bool = True, compresses: bool = True) -> ShardedCache:
        """An empty cache; without `forgets` it keeps what windows leave behind, for `ShardedCache.span` to give.

        Where the engine has a budget, one that `compresses` comes to have it.
        """
        self.check_open()
        assert self._hooks is not None
        cache = self._hooks.new_cache()
        cache.forgets, cache.compresses = forgets, cache.compresses and compresses
        return cache

    def _check_prompt(self, ids: Tensor, mask: Any, past: Any, options: dict[str, Any]) -> None:
        check_tokens(ids)
        check_vocabulary(ids, mask, self.module)
        if ids.numel() == 0:
            raise ValueError(f"the prompt is empty: input_ids has shape {list(ids.shape)}, [B, S] was expected")
        held = past.get_seq_length() if past is not None else 0
        self._limits.check(ids.shape[1] + held, options)


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


def last_tokens(tokens: Sequence[Tokens], candidates: Sequence[int]) -> np.ndarray:
    """Of how many last tokens of each sequence logits are wanted, where so many of them are candidates.

    A ValueError where there is no token before them.
    """
    lengths = [len(row) for row in tokens]
    if len(candidates) != len(lengths) or not all(0 <= n < m for n, m in zip(candidates, lengths, strict=False)):
        raise ValueError(f"candidates = {list(candidates)}: allowed: of each sequence fewer than its tokens, {lengths}")
    return 1 + np.asarray(candidates)


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
