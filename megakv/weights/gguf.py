"""GGUF files: their weights and tokenizer, written once as a folder of safetensors."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import uuid
from pathlib import Path

import torch

from megakv.base.errors import MegaKVError, require_extra
from megakv.base.tensor_files import sync
from megakv.weights.file_digests import CACHE, KeptDigests

SUFFIX = ".gguf"
PLAIN = {"F32": torch.float32, "F16": torch.float16}
"""Types of matrices that are kept; all others become bfloat16."""


PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
"""Name, number and count of a file that llama.cpp has split."""


def gguf_directory(source: Path, cache: Path = CACHE) -> Path:
    """The folder in the cache that a GGUF file was converted to, now or earlier; it is named by the file's checksum."""
    if not source.is_file():
        raise MegaKVError(f"model {str(source)!r}: there is no such GGUF file")
    if (part := PART.fullmatch(source.name)) and int(part[3]) > 1:
        name, number, count = part.groups()
        first, last = (f"{name}-{each}-of-{count}.gguf" for each in ("00001", count))
        raise MegaKVError(
            f"model {source} is part {int(number)} of {int(count)} of a split GGUF file, {first} to {last}: join them "
            f"by llama.cpp's `llama-gguf-split --merge {first} {name}.gguf`, and give {name}.gguf"
        )
    require_extra("gguf", f"model {source}")
    try:
        (digest,) = KeptDigests(cache).of([source]).values()
        target = cache / f"{source.stem}-{digest[:16]}"
        cache.mkdir(parents=True, exist_ok=True)
        # Of all processes that want it, one converts.
        with open(cache / f"{target.name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_dir():
                convert(source, target)
    except OSError as error:
        raise MegaKVError(f"model {source} cannot be converted into {cache}: {error.strerror or error}") from error
    return target


def convert(source: Path, target: Path) -> None:
    """Write a folder of safetensors and a tokenizer from a GGUF file, whole or not at all.

    Quantised weights are stored in bfloat16, matrices in float32 or float16 as they are. One process at a time may
    write a folder.

    Raises
    ------
    MegaKVError
        If the file is broken, or not one that transformers can read, or the folder cannot be written.
    """
    dtype = _stored_dtype(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    # What a conversion that was killed has left.
    for left in target.parent.glob(f".{target.name}.*"):
        shutil.rmtree(left)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        _write(source, temporary, dtype)
        for path in (*temporary.iterdir(), temporary):
            sync(path)
        os.rename(temporary, target)
        sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _stored_dtype(source: Path) -> torch.dtype:
    """In which type its weights are to be stored; a file that is broken ends here."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(source)
        parts = int(split.contents()) if (split := reader.get_field("split.count")) else 1
        kinds = {tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1}
    except OSError:
        raise
    except Exception as error:  # whatever its bytes lead the reader to
        raise MegaKVError(f"model {source} is cut short or no GGUF file ({error}); fetch it again") from error
    if parts > 1:
        raise MegaKVError(
            f"model {source} is one of {parts} parts of a split GGUF file: give them their names back and join them by "
            "llama.cpp's `llama-gguf-split --merge`"
        )
    if not kinds:
        raise MegaKVError(f"model {source} holds no weights: a GGUF file of a whole model is needed")
    return PLAIN.get(kinds.pop(), torch.bfloat16) if len(kinds) == 1 else torch.bfloat16


def _write(source: Path, folder: Path, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    place = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            **place, quantization_config=GgufConfig(dequantize=True), dtype=dtype, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(**place)
    except Exception as error:  # transformers raises whatever the file's contents lead it to
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise MegaKVError(f"model {source}: transformers cannot read this GGUF file: {reason}") from error
    if found["missing_keys"]:
        raise MegaKVError(f"model {source} lacks {', '.join(sorted(found['missing_keys'])[:3])}; fetch it again")
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except Exception as error:  # safetensors has its own type for a full disk
        raise MegaKVError(f"model {source} cannot be converted into {folder.parent}: {error}") from error
