"""Where weights come from but for a checkpoint: a module that is loaded already, or a seed, for benchmarks."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from math import prod
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megakv.base.errors import MegaKVError
from megakv.weights.placement.slices import WHOLE, SliceSpec

DEFAULT_STD = 0.02
BLOCK_ELEMENTS = 1 << 20
# Families whose norms multiply by 1 + weight.
ZERO_CENTRED = ("Gemma", "RecurrentGemma", "VaultGemma", "Qwen3Next", "Qwen3_5")


class WeightSource(Protocol):
    """Gives any part of any parameter of a model."""

    owned: bool
    """Whether whole parameters may be used where they lie, because the source gives them away."""

    @property
    def unexpected(self) -> Sequence[str]:
        """Stored keys that the model has no use for."""

    @property
    def bytes_read(self) -> int:
        """Bytes taken from storage so far."""

    def has(self, name: str) -> bool:
        """Whether there is a value for a parameter."""

    def read(self, name: str, spec: SliceSpec) -> Tensor:
        """A part of a parameter, in the source's type; may share memory with the source."""


class ModuleWeights:
    """The weights of a module that is loaded already; each is given away when it is read, so that its memory can go."""

    owned = True
    bytes_read = 0
    unexpected: Sequence[str] = ()

    def __init__(self, module: nn.Module):
        self._tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
        self._tensors |= dict(module.named_buffers(remove_duplicate=False))
        empty = [name for name, tensor in self._tensors.items() if tensor.is_meta]
        if empty:
            raise MegaKVError(f"the model given has no value for {empty[0]} and {len(empty) - 1} more: load it first")

    def has(self, name: str) -> bool:
        return name in self._tensors

    def read(self, name: str, spec: SliceSpec) -> Tensor:
        tensor = self._tensors.pop(name)
        return tensor if spec == WHOLE else spec.take(tensor.detach())


class RandomWeights:
    """The same random model for every tensor-parallel degree, drawn on a device: values differ between their kinds.

    Each parameter is normal with the config's initialiser standard deviation, norms are neutral, biases zero. Blocks of
    rows each have a generator, seeded by seed, name and block: a rank draws those with rows of its part, one at a time.
    """

    owned = True
    bytes_read = 0
    unexpected: Sequence[str] = ()

    def __init__(self, model: PreTrainedModel, seed: int, device: torch.device):
        self._seed = seed
        self._device = device
        text = model.config.get_text_config()
        self._std = float(getattr(text, "initializer_range", None) or getattr(text, "init_std", None) or DEFAULT_STD)
        self._shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
        self._kinds = {name: type(module).__name__ for name, module in model.named_modules()}

    def has(self, name: str) -> bool:
        return name in self._shapes

    def read(self, name: str, spec: SliceSpec) -> Tensor:
        shape = self._shapes[name]
        owner, _, leaf = name.rpartition(".")
        kind = self._kinds.get(owner, "")
        if leaf.endswith("bias") or "Norm" in kind:
            one = not leaf.endswith("bias") and not kind.startswith(ZERO_CENTRED)
            return torch.full(spec.shape(shape), float(one), device=self._device)
        rows, by_rows = shape[0] if shape else 1, spec.ranges is not None and spec.dim == 0
        out = torch.empty(spec.shape(shape) or (1,), device=self._device)
        size, block, at, drawn = max(1, BLOCK_ELEMENTS // prod(shape[1:])), -1, 0, out
        for start, stop in spec.ranges or () if by_rows else ((0, rows),):
            while start < stop:
                if start // size != block:
                    block = start // size
                    drawn = self._drawn(name, block, (min(size, rows - block * size), *shape[1:]))
                part = drawn[start - block * size : stop - block * size]
                out[at : at + len(part)] = part if by_rows else spec.take(part)
                at, start = at + len(part), start + len(part)
        return out.view(spec.shape(shape))

    def _drawn(self, name: str, block: int, shape: tuple[int, ...]) -> Tensor:
        digest = hashlib.blake2b(f"{self._seed}/{name}/{block}".encode(), digest_size=8).digest()
        generator = torch.Generator(device=self._device).manual_seed(int.from_bytes(digest, "little") >> 1)
        return torch.empty(shape, device=self._device).normal_(0.0, self._std, generator=generator)
