"""Sessions on disk: keys and values as safetensors per rank, everything else as JSON; nothing is unpickled.

What is missing, broken or does not fit, and a disk that takes no more, is a `MegaKVError`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from megakv.cache.cache import ShardedCache
from megakv.cache.saved import SavedLayer, SavedTokens
from megakv.distributed.sharding import Layout, TokenBlock, balanced
from megakv.errors import MegaKVError
from megakv.session_folder import META_FILE, TOKENS_FILE, read_values, shard_file, unwritable
from megakv.tensor_files import StreamedTensor, check_types, read_tensors, write_tensors
from megakv.weights.fingerprint import settings_of

FORMAT = 2
"""The latest; in format 1 all sequences were compressed alike, and there was no subfolder."""


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
    """Slots whose keys and values are stored."""
    dtype: str
    """Of keys and values."""
    compressed: list[list[list[int]]] = field(default_factory=list)
    """By sequence, ranges of slots that were compressed: each head has kept some of their tokens."""
    placement: str | None = None
    """Digest of the mapping's placement of KV heads; None where they lie in runs."""
    weights: str | None = None
    """Digest of its weights, as they lie on the tensor-parallel ranks; None in format 1."""
    data: str = ""
    """Subfolder of everything else; empty in format 1, which had none."""


def fingerprint(model: PreTrainedModel, weights: bytes = b"") -> str:
    """A hash of the model's config, and of some weights."""
    config = json.dumps(settings_of(model.config), sort_keys=True, default=str)
    return hashlib.sha256(config.encode() + weights).hexdigest()


def first_fingerprint(model: PreTrainedModel) -> str:
    """What format 1 has for both the config and the weights: of them, the first rows of the embeddings."""
    rows = model.get_input_embeddings().weight[:64].detach().float().cpu().contiguous()
    return fingerprint(model, rows.numpy().tobytes())


def write_shard(folder: Path, cache: ShardedCache, tp_rank: int) -> None:
    """Write one rank's keys, values and coordinates, head by head."""
    tensors: dict[str, StreamedTensor] = {}
    for sequence in range(cache.table.batch):
        slots, positions = cache.table.slots(cache.rank, sequence), cache.table.positions(cache.rank, sequence)
        tensors[f"{sequence}.slots"] = StreamedTensor.of(torch.from_numpy(slots))
        tensors[f"{sequence}.positions"] = StreamedTensor.of(torch.from_numpy(positions))
        if len(slots):
            for layer in range(len(cache)):
                saved = cache.store(layer).save(sequence, slots)
                tensors |= {f"{sequence}.{layer}.{name}": tensor for name, tensor in saved.items()}
    _write(folder / shard_file(cache.rank, tp_rank), tensors)


def write_tokens(folder: Path, input_ids: Tensor, attention_mask: Tensor) -> None:
    """Write the tokens that all ranks share."""
    tensors = {"input_ids": input_ids.long(), "attention_mask": attention_mask.long()}
    _write(folder / TOKENS_FILE, {name: StreamedTensor.of(tensor) for name, tensor in tensors.items()})


def _write(path: Path, tensors: dict[str, StreamedTensor]) -> None:
    if not path.parent.is_dir():
        raise MegaKVError(
            f"this rank sees no {path.parent}, which rank 0 has made: save sessions to a folder that all ranks share"
        )
    try:
        write_tensors(path, tensors)
    except OSError as error:
        raise unwritable(path.parent.parent, error) from error


def read_meta(folder: Path) -> SessionMeta:
    """Read and check `session.json`."""
    path, values = folder / META_FILE, read_values(folder)
    if values["format"] not in range(1, FORMAT + 1):
        raise MegaKVError(f"{path} has format {values['format']!r}; this version reads formats up to {FORMAT}")
    try:
        if values["format"] == 1:
            values["compressed"] = [values.get("compressed", [])] * values["batch"]
        meta = SessionMeta(**values)
    except (KeyError, TypeError, MemoryError, OverflowError) as error:
        raise MegaKVError(f"{path} is broken: {error}") from error
    numbers = (meta.format, meta.cp, meta.tp, meta.layers, meta.batch, meta.length)
    if not all(isinstance(number, int) and number > 0 for number in numbers):
        raise MegaKVError(f"{path} is broken: format, cp, tp, layers, batch and length must be positive integers")
    if len(meta.compressed) != meta.batch or not all(_ascending(ranges, meta.length) for ranges in meta.compressed):
        raise MegaKVError(f"{path} is broken: compressed must be ascending ranges of slots below length")
    return meta


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
    if meta.tp != expected.tp:
        raise MegaKVError(f"{folder} was saved with tensor_parallel.tp_size = {meta.tp}, this engine has {expected.tp}")
    if meta.placement != expected.placement:
        saved, here = ("its own megakv.fairkv.mapping" if each.placement else "none" for each in (meta, expected))
        raise MegaKVError(
            f"{folder} was saved with another placement of KV heads ({saved}; this engine has {here}); use the mapping "
            "that it was saved with"
        )
    if (meta.layers, meta.dtype) != (expected.layers, expected.dtype):
        raise MegaKVError(
            f"{folder} holds {meta.layers} layers of {meta.dtype}, this engine has {expected.layers} of "
            f"{expected.dtype}; set dtype to match"
        )
    if meta.weights != expected.weights:
        raise MegaKVError(
            f"{folder} was saved with another model of the same config (its weights differ); load it with that one, "
            "and with the same megakv.feed_forward"
        )


def read_tokens(folder: Path, meta: SessionMeta) -> tuple[Tensor, Tensor]:
    """``[B, S]`` tokens and mask."""
    tensors = read_tensors(folder / meta.data / TOKENS_FILE, ["input_ids", "attention_mask"])
    ids, mask = tensors["input_ids"], tensors["attention_mask"]
    if ids.dim() != 2 or ids.shape != mask.shape or ids.shape[0] != meta.batch or ids.shape[1] < meta.length:
        raise MegaKVError(f"{folder / meta.data / TOKENS_FILE} does not fit {META_FILE}: {list(ids.shape)} tokens")
    return ids, mask


def read_cache(folder: Path, meta: SessionMeta, cache: ShardedCache, tp_rank: int, device: torch.device) -> None:
    """Fill an empty cache, on whatever context-parallel degree it has, with a saved session's keys and values.

    Tokens stay with their rank where the degree is the same, and are spread anew, balanced, where it is not.
    """
    files = [folder / meta.data / shard_file(rank, tp_rank) for rank in range(meta.cp)]
    for path in files:
        # Which is that of the engine, as `check_meta` found.
        check_types(path, getattr(torch, meta.dtype.removeprefix("torch.")))
    names = [f"{row}.{kind}" for row in range(meta.batch) for kind in ("slots", "positions")]
    saved = [_block(read_tensors(path, names), meta, path) for path in files]
    everything, _ = TokenBlock.joined(saved)
    if meta.cp == cache.size:
        layout = Layout(tokens=tuple(saved), stored=tuple(saved), replicated=False)
    else:
        layout = balanced(everything, cache.size)
    if any(meta.compressed):
        if not cache.compressible:
            raise MegaKVError(
                f"{folder} holds compressed keys and values, which are not supported with megakv.offload.enabled = "
                "true; restore it with megakv.offload.enabled = false"
            )
        cache.compresses = True
    cache.begin(layout, meta.batch)
    mine = layout.stored[cache.rank]
    for sequence, ranges in enumerate(meta.compressed):
        held = [block.slot[block.run(sequence)] for block in saved]
        tokens = SavedTokens(held, mine.slot[mine.run(sequence)], ranges)
        for layer in range(meta.layers if len(tokens.slots) else 0):
            store, prefix = cache.store(layer), f"{sequence}.{layer}."
            try:
                store.load(sequence, SavedLayer(files, prefix, tokens, device))
            except (ValueError, IndexError) as error:
                raise MegaKVError(f"{folder}: its files do not fit together in {prefix}: {error}") from error
            # Rows of an offloaded layer leave the accelerator before the next one's come.
            store.finish()
    cache.commit(meta.length)
    cache.compressed = [[(first, last) for first, last in ranges] for ranges in meta.compressed]


def _block(tensors: dict[str, Tensor], meta: SessionMeta, path: Path) -> TokenBlock:
    sequences, slots, positions = [], [], []
    for row in range(meta.batch):
        slot, position = tensors[f"{row}.slots"].numpy(), tensors[f"{row}.positions"].numpy()
        in_order = slot.ndim == 1 and slot.shape == position.shape and bool((np.diff(slot) > 0).all())
        if not in_order or (len(slot) and not 0 <= slot[0] <= slot[-1] < meta.length):
            raise MegaKVError(f"{path}: {row}.slots are not ascending slots below {meta.length}")
        sequences.append(np.full(len(slot), row, dtype=np.int64))
        slots.append(slot)
        positions.append(position)
    return TokenBlock(np.concatenate(sequences), np.concatenate(slots), np.concatenate(positions), meta.batch)
