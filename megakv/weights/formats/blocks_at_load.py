"""Plain weights that are rounded to GGUF's blocks as they are read: 8.5 or 5 bits each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from megakv.base.errors import CombinationError
from megakv.weights.blocks import BLOCKS, pack
from megakv.weights.formats.format import LoadRequest, Owner, WeightFormat
from megakv.weights.packed_experts import packable_experts
from megakv.weights.packed_linear import PackedLinear, check_blocks, pack_modules, packable_weights
from megakv.weights.placement.plan import EXPERT_WEIGHTS, decoder_layers, is_experts
from megakv.weights.placement.slices import SliceSpec

CHUNK = 4 << 20
"""Weights that are rounded at a time: their float32 copies stay that small."""


class BlocksAtLoad(WeightFormat):
    """Linears, the output head and embeddings in blocks; what has no whole blocks in a row stays plain."""

    at_load = True
    kind: ClassVar[str]
    """The block type of linears in decoder layers."""
    outside: ClassVar[str] = "Q8_0"
    """That of embeddings and the output head, whose errors all tokens see."""

    def __init__(self, directory: Path | None = None):
        super().__init__(directory)
        self.kinds: dict[str, str] = {}
        self._shapes: dict[str, torch.Size] = {}
        self.multiples = (BLOCKS[self.kind].elements,)

    def check(self, request: LoadRequest, config: PreTrainedConfig) -> None:
        if request.device.type != "cpu":
            raise CombinationError(
                "machine",
                f"megakv.weights.format = {self.name!r} cannot be used on {request.device}: blocks are multiplied by "
                "processors alone; allowed: 'as_stored', or 'fp8' where the device has it",
            )

    def replace(self, model: PreTrainedModel) -> None:
        inside = {id(parameter) for layer in decoder_layers(model)[1] for parameter in layer.parameters()}
        shapes = packable_weights(model) | packable_experts(model)
        wanted = {name: self.kind if id(model.get_parameter(name)) in inside else self.outside for name in shapes}
        self.kinds = {name: kind for name, kind in wanted.items() if shapes[name][-1] % BLOCKS[kind].elements == 0}
        for path, module in model.named_modules():
            if is_experts(module) and any(f"{path}.{name}" not in self.kinds for name in EXPERT_WEIGHTS):
                raise ValueError(
                    f"megakv.weights.format = {self.name!r} is not supported for model type "
                    f"{model.config.model_type!r}: its experts are stored transposed, or their rows are no whole "
                    f"blocks of {self.multiples[0]}; allowed: 'as_stored' or 'fp8'"
                )
        self._shapes = {name: shapes[name] for name in self.kinds}

    def check_cut(self, placement: Mapping[str, SliceSpec], tp_size: int) -> None:
        check_blocks(self.kinds, placement, self._shapes, tp_size)

    def prepare(self, model: PreTrainedModel, dtype: torch.dtype) -> dict[str, torch.dtype]:
        self.made = {name: (name,) for name in self.kinds}
        return pack_modules(model, self.kinds, dtype)

    def make(self, owners: Sequence[Owner], part: Tensor, homes: Sequence[Tensor | None]) -> None:
        (home,), (module, name) = homes, owners[0]
        packed = torch.empty_like(getattr(module, name), device=part.device) if home is None else home
        kind = vars(module)["forward"].kinds[name] if is_experts(module) else cast(PackedLinear, module).kind
        # Experts lie one behind the other.
        rows, into = part.flatten(0, -2), packed.flatten(0, -2)
        step = max(1, CHUNK // rows.shape[1])
        for first in range(0, len(rows), step):
            into[first : first + step] = pack(rows[first : first + step], kind)
        weight = nn.Parameter(packed, requires_grad=False)
        for owner, leaf in owners:
            setattr(owner, leaf, weight)

    def contents(self, tp_size: int) -> dict[str, str]:
        return {"weights": f"{self.kind}, {self.outside}"}


class Int8Format(BlocksAtLoad):
    """Blocks of 32 levels of 8 bits with one scale: 8.5 bits a weight."""

    name, kind = "int8", "Q8_0"
    loses = "weights of linears and embeddings are rounded to 8 bits in blocks of 32"


class Q41Format(BlocksAtLoad):
    """Blocks of 32 levels of 4 bits with a scale and an offset: 5 bits a weight."""

    name, kind = "q4_1", "Q4_1"
    loses = "weights of linears are rounded to 4 bits in blocks of 32, embeddings and the output head to 8"
