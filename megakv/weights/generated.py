"""Weights made from a seed, for benchmarks without a checkpoint."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megakv.weights.placement.slices import SliceSpec

BLOCK_ELEMENTS = 1 << 20
DEFAULT_STD = 0.02
# Families whose norms multiply by 1 + weight.
ZERO_CENTRED = ("Gemma", "RecurrentGemma", "VaultGemma", "Qwen3Next", "Qwen3_5")


class RandomWeights:
    """The same random model for every tensor-parallel degree.

    Each parameter is normal with the config's initialiser standard deviation, norms are neutral, biases zero. Values
    are drawn in blocks of rows, each from a generator seeded by (seed, name, block), so that a rank draws only the
    blocks that hold rows of its part.

    Parameters
    ----------
    model : PreTrainedModel
        The whole model, on the meta device.
    device : torch.device
        Where values are drawn. They differ between kinds of devices.
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
        per_block = max(1, BLOCK_ELEMENTS // columns)
        block_of = kept_rows // per_block
        for block in block_of.unique().tolist():
            first = block * per_block
            drawn = self._block(name, block, min(per_block, rows - first), columns)
            mine = (block_of == block).nonzero().squeeze(1)
            begin, count = int(mine[0]), len(mine)
            inside = kept_rows[mine] - first
            picked = drawn if count == len(drawn) and not inside.diff().ne(1).any() else drawn[inside.to(drawn.device)]
            picked = SliceSpec(1, spec.ranges).take(picked) if by_columns else picked
            if int(mine[-1]) == begin + count - 1:
                out[begin : begin + count] = picked
            else:
                out[mine.to(out.device)] = picked
        return out

    def _block(self, name: str, block: int, rows: int, columns: int) -> Tensor:
        digest = hashlib.blake2b(f"{self._seed}/{name}/{block}".encode(), digest_size=8).digest()
        generator = torch.Generator(device=self._device).manual_seed(int.from_bytes(digest, "little") >> 1)
        return torch.empty(rows, columns, device=self._device).normal_(0.0, self._std, generator=generator)
