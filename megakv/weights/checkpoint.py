"""Weights of a Hugging Face checkpoint, read by parts."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from megakv.base.errors import MegaKVError
from megakv.weights.files import StoredTensors
from megakv.weights.lazy import LazyTensor, from_tensor
from megakv.weights.placement.slices import SliceSpec


class StoredNames:
    """What stored names are called in a model, by transformers' own rules."""

    def __init__(self, model: PreTrainedModel, rules: Sequence[WeightTransform] | None = None):
        rules = get_model_conversion_mapping(model) if rules is None else rules
        self._renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        self.converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        self._prefix, self._expected = model.base_model_prefix, model.state_dict()

    def of(self, key: str) -> tuple[str, str | None]:
        """The name that a stored one comes to, and the pattern of what converts it; perhaps none of the model's."""
        name, pattern = rename_source_key(key, self._renamings, self.converters, self._prefix, self._expected)
        if name not in self._expected and key in self._expected:
            name, pattern = rename_source_key(key, [], [], self._prefix, self._expected)
        return name, pattern


class CheckpointWeights:
    """A safetensors checkpoint, seen under the parameter names of a model.

    Stored names and layouts are translated by transformers' own rules (renamings, and conversions such as the merging
    of separately stored experts), traced without reading anything. The model is whole, on the meta device; it has no
    use for the stored keys in `unexpected`.
    """

    owned = False

    def __init__(self, directory: Path, model: PreTrainedModel, stored: StoredTensors | None = None):
        self._stored = stored or StoredTensors(directory)
        self._entries: dict[str, LazyTensor] = {}
        self._keys: dict[str, list[str]] = {}
        self.unexpected: list[str] = []
        expected = model.state_dict()
        self._trace(model, expected)
        for name, entry in self._entries.items():
            if name in expected and entry.shape != expected[name].shape:
                key = self._keys[name][0]
                raise MegaKVError(
                    f"{directory / self._stored.file_of[key]}: {key} gives {name} the shape {list(entry.shape)}, "
                    f"expected {list(expected[name].shape)} by config.json"
                )
        self._check_present(model, expected)

    @property
    def bytes_read(self) -> int:
        """Bytes taken from the files so far."""
        return self._stored.bytes_read

    def has(self, name: str) -> bool:
        return name in self._entries

    def read(self, name: str, spec: SliceSpec) -> Tensor:
        entry = self._entries[name]
        return entry.whole() if spec.ranges is None else entry.read(spec.dim, spec.ranges)

    def _trace(self, model: PreTrainedModel, expected: dict[str, Tensor]) -> None:
        """Find, as transformers' `convert_and_load_state_dict_in_model` does, what makes up each parameter."""
        names = StoredNames(model, self._rules(model))
        converter_of = {pattern: rule for rule in names.converters for pattern in rule.source_patterns}
        pending: dict[str, WeightConverter] = {}
        for key in sorted(self._stored.file_of, key=dot_natural_key):
            name, pattern = names.of(key)
            if name not in expected:
                self.unexpected.append(key)
                continue
            tensor = self._stored.open(key)
            self._keys.setdefault(name, []).append(key)
            if pattern is None:
                self._entries[name] = tensor
            else:
                converter = pending.setdefault(name, deepcopy(converter_of[pattern]))
                converter.add_tensor(name, key, pattern, tensor)
        for first, converter in pending.items():
            keys = self._keys[first]
            for name, result in self._convert(first, converter, model).items():
                self._entries[name] = result if isinstance(result, LazyTensor) else from_tensor(result)
                self._keys[name] = keys

    def _rules(self, model: PreTrainedModel) -> list[WeightTransform]:
        """How stored names and layouts become the model's."""
        return get_model_conversion_mapping(model)

    def _convert(self, first: str, converter: WeightConverter, model: PreTrainedModel) -> dict[str, Any]:
        """Parameters by name that a conversion makes of what it was given."""
        try:
            converted = converter.convert(first, model=model, config=model.config)
        except (RuntimeError, ValueError, IndexError, KeyError, TypeError) as error:
            keys = self._keys[first]
            raise MegaKVError(
                f"{self._stored.directory}: {first} cannot be put together from {keys[0]} and {len(keys) - 1} more "
                f"({error}); the checkpoint is incomplete or of another model"
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}

    def _check_present(self, model: PreTrainedModel, expected: dict[str, Tensor]) -> None:
        tied: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            tied.setdefault(id(parameter), []).append(name)
        missing = [names[0] for names in tied.values() if not any(self.has(name) for name in names)]
        missing += [name for name, _ in model.named_buffers() if name in expected and not self.has(name)]
        if missing:
            raise MegaKVError(
                f"{self._stored.directory} has no {missing[0]}"
                + (f" (and lacks {len(missing) - 1} more)" if len(missing) > 1 else "")
                + f", which {type(model).__name__} needs; fetch the checkpoint again, or correct its config.json"
            )
        for names in tied.values():
            first, *others = filter(self.has, names)
            for other in others:
                self._check_equal(first, other)

    def _check_equal(self, name: str, other: str) -> None:
        one, two = self._entries[name], self._entries[other]
        for start in range(0, one.shape[0], 4096):
            part = ((start, min(start + 4096, one.shape[0])),)
            if not one.read(0, part).equal(two.read(0, part)):
                raise MegaKVError(
                    f"{self._stored.directory}: config.json ties {other} to {name}, but the checkpoint stores "
                    "different values for them; set tie_word_embeddings to false in config.json"
                )
