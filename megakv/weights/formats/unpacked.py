"""Formats whose weights are unpacked as they are read: a rank unpacks no more than its own part, weight by weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from megakv.base.errors import MegaKVError
from megakv.weights.checkpoint import CheckpointWeights
from megakv.weights.files import QUANTISED_TYPES, StoredTensors, weight_files
from megakv.weights.formats.exact_blocks import SIZE, BlockTensor
from megakv.weights.formats.format import LoadRequest, WeightFormat, quantization_of
from megakv.weights.lazy import LazyTensor
from megakv.weights.packed_linear import pack_modules, packable_weights
from megakv.weights.placement.slices import Ranges, SliceSpec
from megakv.weights.sources import WeightSource

CHUNK = 4 << 20
"""Elements unpacked at a time: what is computed in float32 stays that small."""
Parts = Mapping[str, LazyTensor]
"""Stored tensors of one weight, by the ends of their keys."""


def forget_quantization(model: PreTrainedModel) -> None:
    """Take what a model's config says of quantised weights from it, where it has them no longer."""
    for config in (model.config, model.config.get_text_config()):
        if hasattr(config, "quantization_config"):
            del config.quantization_config


def whole_number(values: Mapping[str, Any], key: str, allowed: range | tuple[int, ...], default: int) -> int:
    """A number of a quantization_config; a ValueError where it is none that is known."""
    found = values.get(key, default)
    if isinstance(found, bool) or not isinstance(found, int) or found not in allowed:
        known = f"{allowed[0]} to {allowed[-1]}" if isinstance(allowed, range) else " or ".join(map(str, allowed))
        raise ValueError(f"config.json: quantization_config.{key} = {found!r} is not supported; allowed: {known}")
    return found


class UnpackedFormat(WeightFormat):
    """Weights that consist of several stored tensors.

    Those that GGUF's blocks hold without a change stay packed in these; others are unpacked to the model's type, and
    are plain ones then.
    """

    method: ClassVar[str]
    """``quant_method`` in config.json."""
    ends: ClassVar[Mapping[str, str]]
    """Ends of stored keys, and what stands in their place in the name of the weight that they belong to."""
    scales: ClassVar[tuple[str, ...]]
    """Ends of tensors that must hold finite numbers."""

    def __init__(self, directory: Path | None = None):
        super().__init__(directory)
        self._stored: UnpackedTensors | None = None
        self._packs = False
        self.kinds: dict[str, str] = {}
        """Block types of weights that stay packed, by name."""

    @classmethod
    def recognises(cls, directory: Path, config: PreTrainedConfig) -> bool:
        return quantization_of(config).get("quant_method") == cls.method

    @property
    def quantised(self) -> str | None:
        return self.method

    def check(self, request: LoadRequest, config: PreTrainedConfig) -> None:
        self.configure(quantization_of(config))
        # What multiplies with blocks is made for processors.
        self._packs = request.device.type == "cpu"
        if self.directory is not None:
            self._stored = UnpackedTensors(self.directory, self)

    def configure(self, values: Mapping[str, Any]) -> None:
        """Take what config.json says; a ValueError where that is not known."""

    def unpack(self, name: str, parts: Parts) -> LazyTensor:
        """A weight, unpacked from stored tensors as it is read; a ValueError where they do not fit."""
        raise NotImplementedError

    def replace(self, model: PreTrainedModel) -> None:
        assert self.directory is not None
        if self._stored is None and weight_files(self.directory):
            self.check(LoadRequest(torch.device("cpu"), None), model.config)
        forget_quantization(model)
        if self._stored is None:
            # A plan for a folder without weights: nothing says which could stay packed.
            return
        self._weights = UnpackedWeights(self.directory, model, self._stored)
        if self._packs:
            found = {name: self._weights.kind(name) for name in packable_weights(model)}
            self.kinds = {name: kind for name, kind in found.items() if kind is not None}
        if self.kinds:
            self.multiples = (SIZE,)
        packed = {name for name in self._weights.packed if name not in self.kinds}
        if packed:
            state = model.state_dict()
            millions = sum(state[name].numel() for name in packed) / 1e6
            dtype = str(model.dtype).removeprefix("torch.")
            self.notes.append(
                f"{self.directory}: {millions:,.1f} million weights in {self.method} are unpacked to {dtype} as they "
                "are read, and take the memory of plain ones"
            )

    def source(self, directory: Path, model: PreTrainedModel) -> WeightSource:
        return self._weights

    def check_cut(self, placement: Mapping[str, SliceSpec], tp_size: int) -> None:
        for name, spec in placement.items():
            if spec.dim == 1 and any(end % SIZE for ends in spec.ranges or () for end in ends):
                # As plain ones they can be cut anywhere.
                self.kinds.pop(name, None)

    def prepare(self, model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
        if self.kinds:
            self._weights.in_blocks = frozenset(self.kinds)
        return pack_modules(model, self.kinds, dtype)


class UnpackedWeights(CheckpointWeights):
    """The weights of a model, of which those `in_blocks` are read as packed rows."""

    in_blocks: frozenset[str] = frozenset()

    @property
    def packed(self) -> set[str]:
        """Parameters that are stored in several tensors each, or are made of such."""
        keys = self._stored.packed if isinstance(self._stored, UnpackedTensors) else set[str]()
        return {name for name, parts in self._keys.items() if keys.intersection(parts) and self.has(name)}

    def kind(self, name: str) -> str | None:
        """The block type of a weight that may stay packed."""
        entry = self._entries.get(name)
        return entry.kind if isinstance(entry, BlockTensor) else None

    def read(self, name: str, spec: SliceSpec) -> Tensor:
        entry = self._entries[name]
        if name in self.in_blocks and isinstance(entry, BlockTensor):
            whole = (0, ((0, entry.shape[0]),))
            return entry.blocks(*(whole if spec.ranges is None else (spec.dim, spec.ranges)))
        return super().read(name, spec)


class UnpackedTensors(StoredTensors):
    """A checkpoint's tensors, where those that make up a weight together are seen as that weight."""

    def __init__(self, directory: Path, form: UnpackedFormat):
        super().__init__(directory, QUANTISED_TYPES)
        self._form = form
        self._keys: dict[str, dict[str, str]] = {}
        self._opened: dict[str, LazyTensor] = {}
        for key in self.file_of:
            end = next((end for end in form.ends if key.endswith(end)), "")
            name = key.removesuffix(end) + form.ends[end] if end else key
            self._keys.setdefault(name, {})[end] = key
        self.packed = {name for name, keys in self._keys.items() if set(keys) != {""}}
        if not self.packed:
            first = next(iter(self.file_of), "nothing")
            raise MegaKVError(
                f"{directory / 'config.json'} says that weights are quantised ({form.method}), but they are stored "
                f"plain ({first} first): remove quantization_config from it, or fetch the checkpoint again"
            )
        stored = self.file_of
        self.file_of = {name: stored[next(iter(keys.values()))] for name, keys in self._keys.items()}
        self._file_of_key = stored
        for name in sorted(self.packed):
            self.open(name)
            self._check_scales(name)

    def open(self, name: str) -> LazyTensor:
        if (opened := self._opened.get(name)) is not None:
            return opened
        keys = self._keys[name]
        parts = {end: self.open_in(key, self._file_of_key[key]) for end, key in keys.items()}
        if name not in self.packed:
            return parts[""]
        try:
            self._opened[name] = self._form.unpack(name, parts)
        except (ValueError, KeyError) as error:
            shapes = ", ".join(f"{keys[end]} {list(part.shape)}" for end, part in parts.items())
            why = f"its {error.args[0] or 'weight'} is missing" if isinstance(error, KeyError) else str(error)
            raise MegaKVError(
                f"{self.directory}: {name} cannot be unpacked as {self._form.method}: {why} (stored: {shapes}); fetch "
                "the checkpoint again"
            ) from error
        return self._opened[name]

    def _check_scales(self, name: str) -> None:
        for end in self._form.scales:
            if (key := self._keys[name].get(end)) is not None:
                check_finite(key, self.open_in(key, self._file_of_key[key]).whole(), self.directory)


def check_finite(key: str, values: Tensor, directory: Path) -> None:
    """Refuse scales that are no numbers: every product with them would be none."""
    if values.is_floating_point() and not bool(values.float().isfinite().all()):
        raise MegaKVError(f"{directory}: {key} holds NaN or infinity; fetch the checkpoint again")


def runs(dim: int, ranges: Ranges, wanted: int, size: int) -> Ranges:
    """Ranges along the dimension `wanted`, where those given are along `dim`: all of it along another."""
    return ranges if dim == wanted else ((0, size),)


def indices(ranges: Ranges) -> Tensor:
    """The indices in some ranges."""
    return torch.cat([torch.arange(start, stop) for start, stop in ranges])


def in_chunks(rows: int, columns: int) -> Iterator[slice]:
    """Slices of rows that hold about `CHUNK` elements."""
    step = max(1, CHUNK // max(1, columns))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))
