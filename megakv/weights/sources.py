"""Where weights come from but for a checkpoint: a module that is loaded already, or a seed, for benchmarks."""

from __future__ import annotations

import hashlib
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megakv.errors import MegaKVError
from megakv.weights.placement.slices import SliceSpec

BLOCK_ELEMENTS = 1 << 20
DEFAULT_STD = 0.02
# Families whose norms multiply by 1 + weight.
ZERO_CENTRED = ("Gemma", "RecurrentGemma", "VaultGemma", "Qwen3Next", "Qwen3_5")


class WeightSource(Protocol):
    """Gives any part of any parameter of a model."""

    owned: bool
    """Whether whole parameters may be used where they lie, because the source gives them away."""

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

    def __init__(self, module: nn.Module):
        self._tensors: dict[str, Tensor] = dict(module.named_parameters(remove_duplicate=False))
        self._tensors |= dict(module.named_buffers(remove_duplicate=False))
        empty = [name for name, tensor in self._tensors.items() if tensor.is_meta]
        if empty:
            raise MegaKVError(f"the model given has no value for {empty[0]} and {len(empty) - 1} more: load it first")

    def has(self, name: str) -> bool:
        return name in self._tensors

    def read(self, name: str, spec: SliceSpec) -> Tensor:
        return spec.take(self._tensors.pop(name).detach())


class RandomWeights:
    """The same random model for every tensor-parallel degree, drawn on a device: values differ between their kinds.

    Each parameter is normal with the config's initialiser standard deviation, norms are neutral, biases zero. Values
    are drawn in blocks of rows, each from a generator seeded by (seed, name, block), so that a rank draws only the
    blocks that hold rows of its part.
    """

    owned = True
    bytes_read = 0

    def __init__(self, model: PreTrainedModel, seed: int, device: torch.device):
        self._seed = seed
        self._device = device
        text = model.config.get_text_config()
        self._std = float(getattr(text, "initializer_range", None) or getattr(text, "init_std", None) or DEFAULT_STD)
        self._shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
        self._owners = dict(model.named_modules())

    def has(self, name: str) -> bool:
        return name in self._shapes

    def read(self, name: str, spec: SliceSpec) -> Tensor:
        shape = self._shapes[name]
        local = spec.shape(shape)
        constant = self._constant(name)
        if constant is not None:
            return torch.full(local, constant, device=self._device)
        return self._draw(name, shape, spec).view(local)

    def _constant(self, name: str) -> float | None:
        owner, _, kind = name.rpartition(".")
        if kind.endswith("bias"):
            return 0.0
        module: nn.Module | None = self._owners.get(owner)
        kind_of_module = type(module).__name__
        if "Norm" not in kind_of_module:
            return None
        return 0.0 if kind_of_module.startswith(ZERO_CENTRED) else 1.0

    def _draw(self, name: str, shape: tuple[int, ...], spec: SliceSpec) -> Tensor:
        """The parameter seen as rows of its last dimension, cut by columns or by rows."""
        columns = shape[-1]
        rows = torch.Size(shape[:-1]).numel()
        kept_rows = torch.arange(rows)
        by_columns = spec.ranges is not None and spec.dim == len(shape) - 1
        if spec.ranges is not None and not by_columns:
            kept_rows = spec.take(kept_rows.view(shape[:-1])).reshape(-1)
        width = spec.size if by_columns else columns
        out = torch.empty(len(kept_rows), width, device=self._device)
        if not len(kept_rows):
            return out
        per_block = max(1, BLOCK_ELEMENTS // columns)
        block_of, last, drawn = kept_rows // per_block, -1, out
        ends = (kept_rows.diff().ne(1) | block_of.diff().ne(0)).nonzero().squeeze(1) + 1
        for start, stop in pairwise([0, *ends.tolist(), len(kept_rows)]):
            block = int(block_of[start])
            if block != last:
                last, drawn = block, self._block(name, block, min(per_block, rows - block * per_block), columns)
            picked = drawn.narrow(0, int(kept_rows[start]) - block * per_block, stop - start)
            out[start:stop] = SliceSpec(1, spec.ranges).take(picked) if by_columns else picked
        return out

    def _block(self, name: str, block: int, rows: int, columns: int) -> Tensor:
        digest = hashlib.blake2b(f"{self._seed}/{name}/{block}".encode(), digest_size=8).digest()
        generator = torch.Generator(device=self._device).manual_seed(int.from_bytes(digest, "little") >> 1)
        return torch.empty(rows, columns, device=self._device).normal_(0.0, self._std, generator=generator)
