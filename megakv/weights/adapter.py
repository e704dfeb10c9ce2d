"""Adapters (peft's LoRA and DoRA): merged into the weights that they change, part by part, as those are read.

A rank reads and merges its own share alone. The result is that of peft's `merge_and_unload`: the low-rank product in
float32, added to a weight in the type that the model is loaded in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from megakv.base.errors import MegaKVError
from megakv.weights.adapter_config import WEIGHTS_FILE, AdapterConfig
from megakv.weights.checkpoint import StoredNames
from megakv.weights.files import StoredTensors
from megakv.weights.lazy import LazyTensor
from megakv.weights.placement.slices import Ranges, SliceSpec
from megakv.weights.sources import WeightSource

PREFIX = "base_model.model."
LOW_RANK = re.compile(r"(.+)\.lora_(?:(embedding)_)?([AB])(?:\.weight)?")
MAGNITUDE = re.compile(r"(.+)\.lora_magnitude_vector(?:\.weight)?")
WHOLE_TENSOR = re.compile(r"(.+?)(?:\.modules_to_save|\.base_layer)?(\.weight|\.bias)")
"""Modules that were trained as a whole, and biases."""
BLOCK_ELEMENTS = 1 << 24
"""Elements of a weight that are merged at a time: 64 MiB of the product in float32."""


@dataclass(frozen=True)
class LowRank:
    """A change ``scaling * B A`` of a weight ``[out, in]``, by A ``[r, in]`` and B ``[out, r]``.

    With `magnitude` ``[out]`` (DoRA, https://arxiv.org/abs/2402.09353, Equation 5) the rows of the sum are scaled to
    these lengths. The weight is `turned` where it is stored as ``[in, out]``.
    """

    down: LazyTensor
    up: LazyTensor
    scaling: float
    magnitude: LazyTensor | None = None
    turned: bool = False
    rounded: bool = False
    """Whether the product is rounded to the weight's type before it is added, as peft does with embeddings."""

    def merged(self, read: Callable[[SliceSpec], Tensor], spec: SliceSpec, dtype: torch.dtype) -> Tensor:
        """A part of the changed weight, given what reads parts of the one before; both `turned` as that is."""
        over = spec.dim ^ self.turned
        rows = spec.ranges if spec.ranges is not None and over == 0 else ((0, self.up.shape[0]),)
        columns = spec.ranges if over == 1 else None
        up, down = self.up.read(0, rows).float(), self.down.whole().float()
        magnitude = None if self.magnitude is None else self.magnitude.read(0, rows).float()
        if columns is not None and magnitude is None:
            down = SliceSpec(1, columns).take(down)
        # A row's length is that of all its columns, which then are read too.
        whole_rows = columns is not None and magnitude is not None
        part = None if whole_rows else self._upright(read(spec)).to(dtype)
        out = torch.empty(len(up), down.shape[1] if columns is None else SliceSpec(1, columns).size, dtype=dtype)
        step = max(1, BLOCK_ELEMENTS // down.shape[1])
        for start in range(0, len(up), step):
            stop = min(start + step, len(up))
            delta = (up[start:stop] @ down) * self.scaling
            delta = delta.to(dtype) if self.rounded else delta
            if part is not None:
                before = part[start:stop]
            else:
                before = self._upright(read(SliceSpec(int(self.turned), ((start, stop),)))).to(dtype)
            changed = before + delta.to(before.device)
            if magnitude is not None:
                changed *= (magnitude[start:stop] / torch.linalg.norm(changed, dim=1))[:, None]
            out[start:stop] = SliceSpec(1, columns).take(changed) if whole_rows else changed
        return self._upright(out)

    def _upright(self, weight: Tensor) -> Tensor:
        """A weight as ``[out, in]``, or back."""
        return weight.T if self.turned else weight


class AdapterWeights:
    """Another source's weights with an adapter merged into them.

    Names and shapes are checked before anything is read. Changes of modules that the model has no use for (a vision
    tower's) are passed over: those whose names are among `unused`.

    Raises
    ------
    MegaKVError
        If the adapter does not fit the model, by the name in its file.
    """

    owned = False
    unexpected: Sequence[str] = ()

    def __init__(
        self,
        source: WeightSource,
        folder: Path,
        model: PreTrainedModel,
        dtypes: dict[str, torch.dtype],
        unused: Collection[str] = (),
    ):
        self._source, self._dtypes, self._file = source, dtypes, folder / WEIGHTS_FILE
        self.config = AdapterConfig.read(folder)
        self._stored = StoredTensors(folder, single=WEIGHTS_FILE)
        self._model, self._names = model, StoredNames(model)
        self._tied = _tied_names(model)
        self._unused = {self._names.of(key)[0] for key in unused}
        self.changes: dict[str, LowRank] = {}
        """Low-rank changes by the names of the weights."""
        self._replaced: dict[str, LazyTensor] = {}
        self._find()
        if not self.changes and not self._replaced:
            raise MegaKVError(f"{self._file} changes no weight of {type(model).__name__} that text needs")

    @property
    def bytes_read(self) -> int:
        return self._source.bytes_read + self._stored.bytes_read

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def read(self, name: str, spec: SliceSpec) -> Tensor:
        if (change := self.changes.get(name)) is not None:
            return change.merged(lambda part: self._before(name, part), spec, self._dtypes[name])
        return self._before(name, spec)

    def _before(self, name: str, spec: SliceSpec) -> Tensor:
        """A part of a weight without its low-rank change."""
        if (whole := self._replaced.get(name)) is None:
            return self._source.read(name, spec)
        return whole.whole() if spec.ranges is None else whole.read(spec.dim, spec.ranges)

    def _find(self) -> None:
        """Sort the adapter's tensors by the weights that they change."""
        parts: dict[str, dict[str, str]] = {}
        for key in self._stored.file_of:
            inner = key.removeprefix(PREFIX)
            if found := LOW_RANK.fullmatch(inner):
                parts.setdefault(found[1], {})[found[3]] = key
            elif found := MAGNITUDE.fullmatch(inner):
                parts.setdefault(found[1], {})["magnitude"] = key
            elif found := WHOLE_TENSOR.fullmatch(inner):
                self._replace(found[1] + found[2], key)
            else:
                raise self._refusal(key, "is of no kind that can be merged: LoRA, DoRA, and modules trained as a whole")
        for path, keys in parts.items():
            self._change(path, keys)

    def _replace(self, stored: str, key: str) -> None:
        names = self._places(stored, key)
        if names and self._saved_apart(names[0]) and len(names) > 1:
            raise self._refusal(key, f"is of a module that is tied to {names[1]} in this model")
        for name in names:
            self._check_shape(key, tuple(self._parameter(name).shape))
            self._replaced[name] = self._open(key)

    def _saved_apart(self, name: str) -> bool:
        return any(module in name.split(".") for module in self.config.modules_to_save)

    def _change(self, path: str, keys: dict[str, str]) -> None:
        key = next(iter(keys.values()))
        if not (names := self._places(f"{path}.weight", key)):
            return
        if len(names) > 1:
            raise self._refusal(key, f"changes {names[0]}, to which {names[1]} is tied, so that merging changes both")
        (name,) = names
        owner = self._model.get_submodule(name.rpartition(".")[0])
        wanted = {"A", "B", "magnitude"} if self.config.dora else {"A", "B"}
        if missing := wanted - keys.keys():
            raise self._refusal(key, f"comes without its {' and '.join(sorted(missing))}")
        if not isinstance(owner, nn.Linear | Conv1D | nn.Embedding) or (
            self.config.dora and isinstance(owner, nn.Embedding)
        ):
            raise self._refusal(key, f"changes a {type(owner).__name__}, which cannot be merged here")
        turned = not isinstance(owner, nn.Linear)
        sizes = tuple(self._parameter(name).shape)
        out, into = reversed(sizes) if turned else sizes
        rank, scaling = self.config.rank_and_scaling(path)
        self._check_shape(keys["A"], (rank, into))
        self._check_shape(keys["B"], (out, rank))
        magnitude = None
        if self.config.dora:
            self._check_shape(keys["magnitude"], (out,))
            magnitude = self._open(keys["magnitude"])
        rounded = isinstance(owner, nn.Embedding)
        self.changes[name] = LowRank(self._open(keys["A"]), self._open(keys["B"]), scaling, magnitude, turned, rounded)

    def _places(self, stored: str, key: str) -> list[str]:
        """The names of the parameter that is stored so, tied ones included; none where text needs none of it."""
        name, pattern = self._names.of(stored)
        if name in self._dtypes:
            if pattern is not None:
                raise self._refusal(key, f"changes a part of {name}, which this model holds merged with others")
            return self._tied.get(name, [name])
        if name in self._unused:
            return []
        raise self._refusal(
            key, f"changes {stored}, which {type(self._model).__name__} has not: it is of another model"
        )

    def _parameter(self, name: str) -> Tensor:
        return self._model.get_parameter(name) if name in self._tied else self._model.get_buffer(name)

    def _check_shape(self, key: str, wanted: tuple[int, ...]) -> None:
        found = tuple(self._stored.open(key).shape)
        if found != wanted:
            raise self._refusal(
                key, f"has the shape {list(found)}, expected {list(wanted)} by the model and {self.config.path.name}"
            )

    def _open(self, key: str) -> LazyTensor:
        """A tensor whose parts are numbers; a `MegaKVError` where one is read that has others."""
        tensor = self._stored.open(key)

        def read(dim: int, ranges: Ranges) -> Tensor:
            part = tensor.read(dim, ranges)
            if not bool(part.isfinite().all()):
                raise self._refusal(key, "holds values that are no numbers (NaN or infinite)")
            return part

        return LazyTensor(tensor.shape, read)

    def _refusal(self, key: str, why: str) -> MegaKVError:
        return MegaKVError(f"{self._file}: {key} {why}; give an adapter of this model, or merge it by peft")


def _tied_names(model: nn.Module) -> dict[str, list[str]]:
    """All names of each parameter, by each of them, itself first."""
    same: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        same.setdefault(id(parameter), []).append(name)
    return {name: [name, *(other for other in names if other != name)] for names in same.values() for name in names}
