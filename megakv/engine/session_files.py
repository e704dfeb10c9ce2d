"""Sessions on disk: keys and values as safetensors per rank, everything else as JSON; nothing is unpickled.

What is missing, broken or does not fit, and a disk that takes no more, is a `MegaKVError`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from megakv.base.errors import MegaKVError
from megakv.base.tensor_files import StreamedTensor, check_types, read_tensors
from megakv.cache.cache import ShardedCache
from megakv.cache.saved import SavedLayer
from megakv.cache.saved_tokens import SavedSlots, SavedTokens, check_format
from megakv.cache.shares import Copies
from megakv.distributed.sharding import TokenTable
from megakv.engine.session_folder import META_FILE, read_values, shard_file, unwritable
from megakv.weights.fingerprint import settings_of
from megakv.weights.placement import HeadMap

if TYPE_CHECKING:
    from megakv.fairkv.replicas import HeadReplicas


@dataclass(frozen=True)
class SessionMeta:
    """What `session.json` holds."""

    format: int
    model: str
    """Fingerprint of the config of the model whose keys and values these are."""
    cp: int
    tp: int
    layers: int
    """Attention layers."""
    batch: int
    length: int
    """Slots whose keys and values are stored; 0 where the next turn reads all tokens."""
    dtype: str
    """Of keys and values."""
    compressed: list[list[list[int]]]
    """By sequence, ranges of slots that were compressed: each head has kept some of their tokens."""
    heads: list[list[list[int]]]
    """By layer and tensor-parallel rank, its KV heads in the order of its tensors."""
    weights: str = ""
    """Digest of its weights."""
    divided: bool = False
    """Whether ranks that hold the same head have divided its tokens."""
    copies: str = "tokens"
    """Whether they have done so sequence by sequence, or have divided the batch."""
    gone: list[int] = field(default_factory=list)
    """By layer, the slot before which its window has left everything behind; empty where nothing was."""
    reach: int = 0
    """Slots that the cache must keep at least, or lose all, for that reason."""
    data: str = ""
    """Subfolder of everything else."""


def fingerprint(model: PreTrainedModel) -> str:
    """A hash of the model's config."""
    config = json.dumps(settings_of(model.config), sort_keys=True, default=str)
    return hashlib.sha256(config.encode()).hexdigest()


def write_shard(
    folder: Path, cache: ShardedCache, tp_rank: int, batch: int, beside: Mapping[str, Tensor] = MappingProxyType({})
) -> None:
    """Write one rank's keys, values and coordinates, head by head, and what is to lie `beside` them."""
    tensors = {name: StreamedTensor.of(tensor) for name, tensor in beside.items()}
    table = cache.table if cache.length else TokenTable(cache.size, batch)
    for sequence in range(batch):
        rows = table.slots(cache.rank, sequence)
        for layer in range(len(cache)):
            saved = cache.store(layer).save(sequence, rows) if len(rows) else {}
            if cache.length and (notes := cache.notes(layer).get(sequence)) is not None:
                saved |= notes.saved()
            tensors |= {f"{sequence}.{layer}.{name}": tensor for name, tensor in saved.items()}
    if not folder.is_dir():
        raise MegaKVError(
            f"this rank sees no {folder}, which rank 0 has made: save sessions to a folder that all ranks share"
        )
    try:
        slots = SavedSlots(0, cache.length, len(cache), table.tokens())
        slots.write(folder / shard_file(cache.rank, tp_rank), cache.rank, tensors)
    except OSError as error:
        raise unwritable(folder.parent, error) from error


def read_meta(folder: Path) -> SessionMeta:
    """Read and check `session.json`."""
    path, values = folder / META_FILE, read_values(folder)
    check_format(
        values["format"], path, "begin the conversation anew, or go on with the version of MegaKV that saved it"
    )
    try:
        meta = SessionMeta(**values)
    except (KeyError, TypeError, MemoryError, OverflowError) as error:
        raise MegaKVError(f"{path} is broken: {error}") from error
    numbers = (meta.format, meta.cp, meta.tp, meta.layers, meta.batch, meta.length)
    if not all(isinstance(number, int) and number >= 0 for number in numbers) or 0 in numbers[:-1]:
        raise MegaKVError(f"{path} is broken: format, cp, tp, layers, batch and length must be positive integers")
    left = [*meta.gone, meta.reach] if isinstance(meta.gone, list) else [None]
    if len(left) not in (1, meta.layers + 1) or not all(type(n) is int and 0 <= n <= meta.length for n in left):
        raise MegaKVError(f"{path} is broken: gone and reach must be numbers of slots up to length")
    if len(meta.compressed) != meta.batch or not all(_ascending(ranges, meta.length) for ranges in meta.compressed):
        raise MegaKVError(f"{path} is broken: compressed must be ascending ranges of slots below length")
    if not _placed(meta):
        raise MegaKVError(f"{path} is broken: heads must be KV heads of {meta.layers} layers on {meta.tp} ranks")
    return meta


def heads_of(head_map: HeadMap) -> list[list[list[int]]]:
    """KV heads by layer and rank, as in `SessionMeta.heads`."""
    return [[list(shard.kv_heads) for shard in layer] for layer in head_map.layers]


def _single(heads: list[list[int]]) -> bool:
    """Whether each lies on one rank."""
    held = [head for rank in heads for head in rank]
    return len(held) == len(set(held))


def _placed(meta: SessionMeta) -> bool:
    """Whether heads are those of every layer and rank, each once on a rank."""
    try:
        ranks = [rank for layer in meta.heads for rank in layer]
        heads = all(type(head) is int and head >= 0 for rank in ranks for head in rank)
        return (
            heads
            and all(len(set(rank)) == len(rank) for rank in ranks)
            and len(meta.heads) == meta.layers
            and all(len(layer) == meta.tp for layer in meta.heads)
        )
    except TypeError:
        return False


def _ascending(ranges: Any, length: int) -> bool:
    """Whether ranges of slots are such, and lie behind one another."""
    try:
        edges = [edge for first, last in ranges for edge in (first, last)]
    except (TypeError, ValueError):
        return False
    return all(type(edge) is int for edge in edges) and [0, *edges, length] == sorted([0, *edges, length])


def check_meta(meta: SessionMeta, folder: Path, expected: SessionMeta) -> None:
    """Refuse a session that an engine cannot continue, whose own sessions would be as expected."""
    if meta.model != expected.model:
        raise MegaKVError(f"{folder} was saved with another model (its config differs); load it with that one")
    if (meta.layers, meta.dtype) != (expected.layers, expected.dtype):
        raise MegaKVError(
            f"{folder} holds {meta.layers} layers of {meta.dtype}, this engine has {expected.layers} of "
            f"{expected.dtype}; set dtype to match"
        )
    if meta.weights != expected.weights:
        raise MegaKVError(
            f"{folder} was saved with another model of the same config (its weights differ); load it with that one, in "
            "the same way (its folder or a module), and with the same dtype and megakv.weights.format"
        )


def read_tokens(folder: Path, meta: SessionMeta) -> tuple[Tensor, Tensor]:
    """``[B, S]`` tokens and mask."""
    path = folder / meta.data / shard_file(0, 0)
    ids, mask = read_tensors(path, ["input_ids", "attention_mask"]).values()
    if ids.dim() != 2 or ids.shape != mask.shape or ids.shape[0] != meta.batch or ids.shape[1] < meta.length:
        raise MegaKVError(f"{path} does not fit {META_FILE}: {list(ids.shape)} tokens")
    return ids, mask


@dataclass(frozen=True)
class HeadsHere:
    """Which KV heads lie where, for a rank that reads: by layer and tensor-parallel rank, as in `SessionMeta.heads`.

    With replicas, ranks that hold the same head divide its tokens, or the batch.
    """

    heads: list[list[list[int]]]
    tp_rank: int
    replicas: HeadReplicas | None = None

    @property
    def divided(self) -> bool:
        return self.replicas is not None and self.replicas.shared

    @property
    def copies(self) -> Copies:
        return "tokens" if self.replicas is None else self.replicas.copies

    def layer(self, number: int, meta: SessionMeta) -> dict[str, Any]:
        """Of a layer, what `SavedLayer` wants to know."""
        alike = (meta.heads, meta.divided, meta.copies) == (self.heads, self.divided, self.copies)
        # Who has which sequence is told by shares, which other mappings with the same heads have others of.
        alike = alike and self.copies == "tokens"
        shares = None if self.replicas is None else self.replicas.shares(number)
        own = self.heads[number][self.tp_rank]
        # Copies of a head that have not divided its tokens have each seen some of its queries.
        placements = ((meta.heads[number], meta.divided), (self.heads[number], self.divided))
        noted = alike or all(divided or _single(heads) for heads, divided in placements)
        same = self.tp_rank if alike else None
        return {"heads": meta.heads[number], "own": own, "alike": same, "shares": shares, "noted": noted}


def read_cache(folder: Path, meta: SessionMeta, cache: ShardedCache, here: HeadsHere, device: torch.device) -> None:
    """Fill an empty cache, on whatever mesh and with whatever placement, with a saved session's keys and values.

    Tokens stay with their rank where the context-parallel degree is the same, and are spread anew, balanced, where it
    is not. Heads are found on the tensor-parallel ranks that had them.
    """
    files: list[list[Path]] = []
    # Degrees may be as large as a file says: the first shard that is missing ends it.
    for tp_rank in range(meta.tp):
        files.append([])
        for rank in range(meta.cp):
            path = folder / meta.data / shard_file(rank, tp_rank)
            # The type is that of the engine, as `check_meta` found.
            check_types(path, getattr(torch, meta.dtype.removeprefix("torch.")))
            files[-1].append(path)
    saved = SavedSlots.read(dict(enumerate(files[0])), meta.cp, meta.batch)
    if (saved.first, saved.last, saved.layers) != (0, meta.length, meta.layers):
        raise MegaKVError(f"{files[0][0]} does not fit {META_FILE}: it has {saved.last} slots of {saved.layers} layers")
    layout = saved.layout(cache.size)
    if not meta.length:
        return
    if any(meta.compressed):
        cache.compresses = True
    cache.begin(layout, meta.batch)
    mine = layout.stored[cache.rank]
    gone = meta.gone or [0] * meta.layers
    for sequence, ranges in enumerate(meta.compressed):
        held = [block.slot[block.run(sequence)] for block in saved.held]
        # Layers with one window share them.
        tokens = {first: SavedTokens(held, mine.slot[mine.run(sequence)], ranges, first) for first in set(gone)}
        for layer, first in enumerate(gone):
            store, prefix = cache.store(layer), f"{sequence}.{layer}."
            try:
                placed = {"prompt": int(cache.table.prompts[sequence]), **here.layer(layer, meta)}
                saved_layer = SavedLayer(files, prefix, tokens[first], device, **placed)
                if len(mine.slot[mine.run(sequence)]):
                    store.load(sequence, saved_layer)
                notes = saved_layer.notes(cache.rank, cache.size)
                cache.note(layer, {**cache.notes(layer), sequence: notes})
            except (ValueError, IndexError) as error:
                raise MegaKVError(f"{folder}: its files do not fit together in {prefix}: {error}") from error
            # Rows of an offloaded layer leave the accelerator before the next one's come.
            store.finish()
    cache.commit(meta.length)
    cache.gone, cache.reach = list(gone), meta.reach
    cache.compressed = [[(first, last) for first, last in ranges] for ranges in meta.compressed]
