"""Weights of GGUF files, which stay in their blocks on processors.

Names of tensors, and how llama.cpp has changed them, are known to transformers. What its rules do to a tensor is found
out with numbered rows in the place of weights: where they only move rows, packed ones move alike, and any part of them
can be read, and so where they join the rows of experts. What they change otherwise is unpacked.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from megakv.base.errors import MegaKVError
from megakv.weights.blocks import BLOCKS
from megakv.weights.formats.format import LoadRequest, WeightFormat
from megakv.weights.gguf import ROTARY, gguf_of
from megakv.weights.gguf_file import PLAIN, GgufFile, StoredTensor, unpacked
from megakv.weights.gguf_rows import StoredExperts, StoredRows, check_scales
from megakv.weights.packed_experts import packable_experts
from megakv.weights.packed_linear import check_blocks, pack_modules, packable_weights
from megakv.weights.placement.plan import EXPERT_WEIGHTS
from megakv.weights.placement.slices import SliceSpec
from megakv.weights.sources import WeightSource


class GgufWeights:
    """The tensors of a file under the parameter names of a model, which is whole and needs no memory."""

    owned = True

    def __init__(self, file: GgufFile, model: PreTrainedModel):
        self.unexpected: list[str] = []
        self._processed_bytes, self.packed = 0, frozenset[str]()
        self._file = file
        self._shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        self._processor, self._names = _rules(file, model)
        self._stored: dict[str, list[StoredTensor]] = {}
        for name, tensor in file.tensors.items():
            # Experts have no ending in transformers' list.
            known = (self._names.get(key) for key in (name, name.removesuffix(".weight")))
            found = next((each for each in known if each in self._shapes), None)
            if found is not None:
                self._stored.setdefault(found, []).append(tensor)
            elif name != ROTARY:
                self.unexpected.append(name)
        self._check_present(model)
        self.rows = {
            name: StoredRows(tensors[0], order, packed=False)
            for name, tensors in self._stored.items()
            if (order := self._order(name, tensors)) is not None
        }
        self.experts = {
            name: StoredExperts(tensors) for name, tensors in self._stored.items() if self._joins(name, tensors)
        }

    @property
    def bytes_read(self) -> int:
        rows, experts = self.rows.values(), self.experts.values()
        return self._processed_bytes + sum(each.bytes_read for each in rows) + sum(each.bytes_read for each in experts)

    def has(self, name: str) -> bool:
        return name in self._stored

    def read(self, name: str, spec: SliceSpec) -> Tensor:
        if name in self.packed and name in self.experts:
            experts = self.experts[name]
            return experts.whole() if spec.ranges is None else experts.read(spec.dim, spec.ranges)
        if name not in self.rows:
            self._processed_bytes += sum(tensor.nbytes for tensor in self._stored[name])
            return spec.take(self._processed(name))
        whole = ((0, self._shapes[name][0]),)
        return self.rows[name].read(*((0, whole) if spec.ranges is None else (spec.dim, spec.ranges)))

    def kind(self, name: str) -> str | None:
        """The block type of a weight that may stay packed."""
        rows, experts = self.rows.get(name), self.experts.get(name)
        kind = rows.tensor.kind if rows is not None else experts.kind if experts is not None else ""
        return kind if kind in BLOCKS else None

    def keep_packed(self, names: Collection[str]) -> None:
        """Give bytes of these from now on."""
        self.packed = frozenset(names)
        for name in self.packed & self.rows.keys():
            self.rows[name].packed = True

    def quantised(self) -> dict[str, set[str]]:
        """Names of parameters that are made of quantised tensors, with the types of these."""
        found = {name: {tensor.kind for tensor in tensors} - PLAIN.keys() for name, tensors in self._stored.items()}
        return {name: kinds for name, kinds in found.items() if kinds}

    def _check_present(self, model: PreTrainedModel) -> None:
        tied: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            tied.setdefault(id(parameter), []).append(name)
        missing = [names[0] for names in tied.values() if not any(map(self.has, names))]
        if missing:
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise MegaKVError(f"model {self._file.path} lacks {missing[0]}{more}; fetch it again")
        for name, (tensor, *others) in self._stored.items():
            if not others and tensor.rows * tensor.shape[-1] != self._shapes[name].numel():
                raise MegaKVError(
                    f"{tensor.file}: {tensor.name} gives {name} the shape {list(tensor.shape)}, expected "
                    f"{list(self._shapes[name])} by the file's own metadata; fetch it again"
                )

    def shape(self, name: str) -> torch.Size:
        """The whole shape of a parameter."""
        return self._shapes[name]

    def _order(self, name: str, tensors: list[StoredTensor]) -> Tensor | None:
        """The stored row of each of the model's where rows are only moved; None where the rules do anything else."""
        tensor = tensors[0]
        if len(tensors) > 1 or len(tensor.shape) != 2 or tensor.shape != tuple(self._shapes[name]):
            return None
        numbered = np.arange(2.0 * tensor.rows).reshape(-1, 2)
        try:
            found = self._processor.process(
                weights=numbered.copy(), name=tensor.name, tensor_key_mapping={}, parsed_parameters={"tensors": {}}
            )
        except Exception:  # noqa: BLE001 - a rule that wants the true columns raises what it likes
            return None
        order = np.asarray(found.weights)
        if found.name != tensor.name or order.shape != numbered.shape or (order[:, 0] + 1 != order[:, 1]).any():
            return None
        rows = torch.from_numpy(order[:, 0] / 2).long()
        return rows if torch.equal(rows.sort().values, torch.arange(tensor.rows)) else None

    def _joins(self, name: str, tensors: list[StoredTensor]) -> bool:
        """Whether the rules do no more than join the rows of experts, of one type."""
        if any(len(tensor.shape) != 3 for tensor in tensors) or len({tensor.kind for tensor in tensors}) > 1:
            return False
        tensors.sort(key=lambda tensor: tensor.name)
        numbered, made, begin = [], dict[str, Any](tensors={}), 0
        for tensor in tensors:
            experts, rows, _ = tensor.shape
            numbered.append(np.arange(begin, begin + 2.0 * experts * rows).reshape(experts, rows, 2))
            begin += 2 * experts * rows
            try:
                self._processor.process(
                    weights=numbered[-1], name=tensor.name, tensor_key_mapping=self._names, parsed_parameters=made
                )
            except Exception:  # noqa: BLE001 - as above
                return False
        found, joined = made["tensors"].get(name), torch.from_numpy(np.concatenate(numbered, axis=1))
        whole = (*joined.shape[:2], tensors[0].shape[2])
        return isinstance(found, Tensor) and torch.equal(found.double(), joined) and whole == self._shapes[name]

    def _processed(self, name: str) -> Tensor:
        """A parameter as transformers makes it of all its tensors."""
        made: dict[str, Any] = {"tensors": {}}
        for tensor in self._stored[name]:
            rows = tensor.read()
            check_scales(tensor, rows)
            values = unpacked(tensor, rows).float().reshape(tensor.shape).numpy()
            found = self._processor.process(
                weights=values, name=tensor.name, tensor_key_mapping=self._names, parsed_parameters=made
            )
            if name not in made["tensors"]:
                made["tensors"][name] = torch.from_numpy(np.ascontiguousarray(found.weights))
        value: Tensor = made["tensors"][name]
        if value.shape != self._shapes[name]:
            raise MegaKVError(
                f"{self._file.path}: {self._stored[name][0].name} gives {name} the shape {list(value.shape)}, expected "
                f"{list(self._shapes[name])} by the file's own metadata; fetch it again"
            )
        return value


class _Named:
    """A model as transformers' table of names is made from it."""

    def __init__(self, model: PreTrainedModel, children: Mapping[str, _Named]):
        self.config, self.state_dict = model.config.get_text_config(), model.state_dict
        self._children = children

    def named_children(self) -> list[tuple[str, _Named]]:
        return list(self._children.items())


def _rules(file: GgufFile, model: PreTrainedModel) -> tuple[Any, Mapping[str, str]]:
    """What transformers does with the tensors of a file, and the model's names by the stored ones."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    kind = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)
    processor = kind(config=model.config.get_text_config().to_dict())
    # Of all modules within each other, which it would make a table of names for, some came from the base model alone.
    base = getattr(model, model.base_model_prefix, model)
    names = _Named(model, {} if base is model else {model.base_model_prefix: _Named(base, {})})
    try:
        return processor, get_gguf_hf_weights_map(cast(PreTrainedModel, names), processor)
    except Exception as error:  # of an architecture that it knows in another way
        raise MegaKVError(
            f"model {file.path}: transformers has no names for the tensors of {file.architecture!r}: {error}"
        ) from error


class GgufFormat(WeightFormat):
    """Weights in blocks of 32 or 256, multiplied as they are by processors; numbers of other types as plain weights."""

    name = "gguf"

    def __init__(self, directory: Path | None = None):
        super().__init__(directory)
        self.kinds: dict[str, str] = {}
        self._shapes: dict[str, torch.Size] = {}
        self._packs = True

    @classmethod
    def recognises(cls, directory: Path, config: PreTrainedConfig) -> bool:
        return gguf_of(directory) is not None

    @cached_property
    def file(self) -> GgufFile:
        """The header of the file, or of all parts."""
        assert self.directory is not None
        source = gguf_of(self.directory)
        assert source is not None
        return GgufFile(source)

    @property
    def origin(self) -> Path:
        return self.file.path

    @property
    def quantised(self) -> str | None:
        return ", ".join(kind for kind in self.file.kinds if kind not in PLAIN) or None

    def check(self, request: LoadRequest, config: PreTrainedConfig) -> None:
        # What multiplies with blocks is made for processors.
        self._packs = request.device.type == "cpu"

    def replace(self, model: PreTrainedModel) -> None:
        self._weights = GgufWeights(self.file, model)
        shapes = packable_weights(model) | packable_experts(model) if self._packs else {}
        stored = {id(model.get_parameter(name)): kind for name in shapes if (kind := self._weights.kind(name))}
        self.kinds = {name: kind for name in shapes if (kind := stored.get(id(model.get_parameter(name))))}
        for path in {name.rpartition(".")[0] for name in packable_experts(model)}:
            # Of a layer's experts all weights are multiplied in one way.
            if len(names := {f"{path}.{name}" for name in EXPERT_WEIGHTS} & self.kinds.keys()) < len(EXPERT_WEIGHTS):
                self.kinds = {name: kind for name, kind in self.kinds.items() if name not in names}
        self._shapes = {name: shapes[name] for name in self.kinds}
        self._weights.keep_packed(self.kinds)
        self.multiples = tuple(sorted({BLOCKS[kind].elements for kind in self.kinds.values()}, reverse=True))
        self._note(model)

    def _note(self, model: PreTrainedModel) -> None:
        """Say what is unpacked, and why."""
        left = {name: kinds for name, kinds in self._weights.quantised().items() if name not in self.kinds}
        if not left:
            return
        elements = sum(self._weights.shape(name).numel() for name in left)
        kinds = ", ".join(sorted(set().union(*left.values())))
        why = "nothing here multiplies them as they are" if self._packs else "only processors multiply them as they are"
        dtype = str(model.dtype).removeprefix("torch.")
        self.notes.append(
            f"{self.file.path}: {elements / 1e6:,.1f} million weights in {kinds} are unpacked to {dtype}, as {why}"
        )

    def source(self, directory: Path, model: PreTrainedModel) -> WeightSource:
        return self._weights

    def check_cut(self, placement: Mapping[str, SliceSpec], tp_size: int) -> None:
        check_blocks(self.kinds, placement, self._shapes, tp_size)

    def prepare(self, model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
        return pack_modules(model, self.kinds, dtype)
