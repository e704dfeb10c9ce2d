"""GGUF files as models: the config and tokenizer that transformers needs of one, written once as a small folder.

Weights stay where they are, and as they are: `megakv.weights.formats.gguf` reads them.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig
from xxhash import xxh3_128

from megakv.base.errors import MegaKVError, require_extra
from megakv.base.json_files import read_json
from megakv.base.tensor_files import sync
from megakv.weights.file_digests import CACHE

if TYPE_CHECKING:
    from megakv.weights.gguf_file import GgufFile

SUFFIX = ".gguf"
POINTER = "gguf.json"
"""The file of such a folder that says where the weights are."""
VERSION = 1
"""The way in which folders are written; what another one has written is not found."""
ENDS = ("eos", "eot", "eom")
"""Names of the tokens that end an answer."""
TIED = ("falcon", "bloom")
"""Families whose output head is their embedding, whatever a file holds."""
LEFT_OUT = {
    "attention.key_length": "head_dim",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
"""Sizes that transformers does not read for all families, and what it calls them."""
ROTARY = "rope_freqs.weight"
"""What frequencies of rotary embeddings are divided by, where a model was made for longer texts."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Settings of such rotary embeddings that all files so far have."""

BLOCK = re.compile(r"blk\.(\d{1,9})\.")
"""How names of a layer's tensors begin."""

logger = logging.getLogger(__name__)


def gguf_directory(source: Path, cache: Path = CACHE) -> Path:
    """The folder in the cache with config and tokenizer of a GGUF file, which is made where it is missing.

    All parts of a split file are one model; any of them may be given.

    Raises
    ------
    MegaKVError
        If the file is broken, or not one that transformers can read, or the folder cannot be written.
    """
    if not source.is_file():
        raise MegaKVError(f"model {str(source)!r}: there is no such GGUF file")
    require_extra("gguf", f"model {source}")
    from megakv.weights.gguf_file import GgufFile

    file = GgufFile(source.resolve())
    target = cache / f"{source.stem}-{_identity(file)}"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        # Of all processes that want it, one writes.
        with open(cache / f"{target.name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_dir():
                _write_whole(file, target)
    except OSError as error:
        raise MegaKVError(
            f"model {source}: its config and tokenizer cannot be written into {cache}: {error.strerror or error}"
        ) from error
    return target


def gguf_of(directory: Path) -> Path | None:
    """The GGUF file that a folder stands for; None for all other folders."""
    pointer = directory / POINTER
    if not pointer.is_file():
        return None
    values = read_json(pointer, str(pointer))
    if not isinstance(values, dict) or not isinstance(values.get("file"), str):
        raise MegaKVError(f"{pointer} names no GGUF file; remove {directory}")
    return Path(values["file"])


def _identity(file: GgufFile) -> str:
    """Digits by which a model, at its place, differs from others: its metadata and what it has of tensors count."""
    hasher = xxh3_128()
    for path in file.files:
        first = min(tensor.offset for tensor in file.tensors.values() if tensor.file == path)
        with open(path, "rb") as opened:
            hasher.update(f"{VERSION} {path}".encode() + opened.read(first))
    return hasher.hexdigest()[:16]


def _write_whole(file: GgufFile, target: Path) -> None:
    """Write the folder, all of it or nothing; one process at a time may."""
    # What one that was killed has left.
    for left in target.parent.glob(f".{target.name}.*"):
        shutil.rmtree(left)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        _write(file, temporary)
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        os.rename(temporary, target)
        sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write(file: GgufFile, folder: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES

    _check_whole(file)
    first = file.files[0]
    place = {"pretrained_model_name_or_path": str(first.parent), "gguf_file": first.name}
    try:
        config = AutoConfig.from_pretrained(**place)
        # The automatic one reads all metadata again, which takes seconds, to find out that there is no class.
        kind = AutoTokenizer if config.model_type in TOKENIZER_MAPPING_NAMES else PreTrainedTokenizerFast
        tokenizer = kind.from_pretrained(**place)
    except Exception as error:  # transformers raises whatever the file's contents lead it to
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise MegaKVError(f"model {file.path}: transformers cannot read this GGUF file: {reason}") from error
    config.dtype = file.dtype
    # Transformers looks into the first part alone.
    config.tie_word_embeddings = "output.weight" not in file.tensors or file.architecture in TIED
    for key, name in LEFT_OUT.items():
        if isinstance(found := file.metadata.get(f"{file.architecture}.{key}"), int) and hasattr(config, name):
            setattr(config, name, found)
    _correct_rotary(config, file)
    ends = [found for name in ENDS if (found := _token(file.metadata, name)) is not None]
    generation = GenerationConfig(
        bos_token_id=_token(file.metadata, "bos"),
        pad_token_id=_token(file.metadata, "padding"),
        eos_token_id=list(dict.fromkeys(ends)) or None,
    )
    try:
        for part in (config, tokenizer, generation):
            part.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:  # tokenizers have their own type for a full disk
        raise OSError(str(error)) from error
    (folder / POINTER).write_text(json.dumps({"file": str(file.path)}))


def _check_whole(file: GgufFile) -> None:
    """Refuse metadata that say another number of layers than is stored, and an output head of another name.

    A module is made for each layer that a config names, be there millions; and a model without a head is tied.
    """
    stored = {int(found[1]) for name in file.tensors if (found := BLOCK.match(name))}
    count = file.metadata.get(f"{file.architecture}.block_count")
    if isinstance(count, int) and stored and (count != len(stored) or max(stored) >= count):
        raise MegaKVError(
            f"model {file.path} has {count} layers by its metadata ({file.architecture}.block_count), and tensors of "
            f"{len(stored)}; fetch it again"
        )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or "output.weight" in file.tensors:
        return
    for name, tensor in file.tensors.items():
        if tensor is not embedding and tensor.shape == embedding.shape and not BLOCK.match(name):
            raise MegaKVError(
                f"model {file.path} has no output.weight, and {name!r} of the same shape, which is no known tensor; "
                f"fetch it again"
            )


def _token(metadata: Mapping[str, Any], name: str) -> int | None:
    found = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return found if isinstance(found, int) and 0 <= found < 1 << 31 else None


def _correct_rotary(config: PreTrainedConfig, file: GgufFile) -> None:
    """Give a config the scaling of rotary embeddings, which transformers does not read from a GGUF file."""
    text: Any = config.get_text_config()
    given = dict(getattr(text, "rope_parameters", None) or {})
    prefix = f"{file.architecture}.rope.scaling"
    kind, factor = (file.metadata.get(f"{prefix}.{key}") for key in ("type", "factor"))
    original = file.metadata.get(f"{prefix}.original_context_length")
    if ROTARY in file.tensors:
        tensor = file.tensors[ROTARY]
        from megakv.weights.gguf_file import unpacked

        divisors = unpacked(tensor, tensor.read()).double().flatten()
        if torch.allclose(divisors, torch.ones_like(divisors), rtol=1e-5):
            return
        scaled = {"rope_type": "llama3", "factor": round(float(divisors.max()), 4), **LLAMA3}
        theta = given.get("rope_theta")
        if theta and torch.allclose(divisors, _llama3(theta, scaled, divisors), rtol=1e-3):
            text.rope_parameters = given | scaled
        else:
            logger.warning(
                "%s divides rotary frequencies in a way that transformers has no name for: they stay undivided, as "
                "transformers leaves them, and long texts may be misread",
                file.path,
            )
    elif kind in ("linear", "yarn") and isinstance(factor, float | int) and factor > 1:
        scaled = {"rope_type": kind, "factor": float(factor)}
        if kind == "yarn" and isinstance(original, int):
            scaled["original_max_position_embeddings"] = original
        text.rope_parameters = given | scaled


def _llama3(theta: float, scaled: Mapping[str, Any], like: Tensor) -> Tensor:
    """What Llama 3's scaling divides each frequency by."""
    lengths = 2 * torch.pi * theta ** (torch.arange(len(like), dtype=torch.float64) / len(like))
    low, high, whole = (scaled[key] for key in LLAMA3)
    smooth = ((whole / lengths - low) / (high - low)).clamp(0, 1)
    return 1 / ((1 - smooth) / scaled["factor"] + smooth)
