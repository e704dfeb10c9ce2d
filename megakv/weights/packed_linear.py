"""Linears and embeddings whose weights stay in GGUF's blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from megakv.base.errors import CombinationError
from megakv.weights.blocks import BLOCKS, unpack
from megakv.weights.packed_experts import pack_experts, unpack_experts
from megakv.weights.packed_product import packed_product
from megakv.weights.placement.plan import ROUTERS, is_experts
from megakv.weights.placement.slices import SliceSpec
from megakv.weights.products import PLAIN, Products
from megakv.weights.tensor_parallel import AllReduce, RowParallelLinear

SCALE, SCALED = "embed_scale", "TextScaledWordEmbedding"
"""The factor of embeddings, and how classes that multiply with it, and do nothing else, are called."""


def packed_parameter(shape: torch.Size, kind: str) -> nn.Parameter:
    """Bytes of a weight in blocks, without memory yet."""
    rows, columns = shape
    size = BLOCKS[kind].row_bytes(columns)
    return nn.Parameter(torch.empty((rows, size), dtype=torch.uint8, device="meta"), requires_grad=False)


class PackedLinear(nn.Linear):
    """A linear, whole or spread over ranks, whose weight is ``[out, row bytes]`` uint8, blocks of a `kind`.

    The bias of the linear that it takes the place of stays in its type, and is added once, after the sum over ranks of
    a row-parallel one.
    """

    def __init__(self, linear: nn.Linear, kind: str, weight: nn.Parameter):
        # Fields of the parent, without memory for a weight that nobody needs.
        nn.Module.__init__(self)
        self.out_features, self.in_features = linear.weight.shape
        self.kind, self.weight = kind, weight
        self.register_parameter("bias", linear.bias)
        self.all_reduce: AllReduce | None = linear.all_reduce if isinstance(linear, RowParallelLinear) else None
        self.products: Products = PLAIN
        """How rows are multiplied, as it was found out for the processor."""

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in]`` to ``[..., out]`` in the type of x."""
        if self.all_reduce is None:
            return packed_product(x, self.weight, self.kind, self.in_features, self.bias, self.products)
        out = self.all_reduce(packed_product(x, self.weight, self.kind, self.in_features, None, self.products))
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, blocks of {self.kind}"


class PackedEmbedding(nn.Module):
    """An embedding whose table is ``[tokens, row bytes]`` uint8, blocks of a `kind`; rows come in `dtype`."""

    def __init__(self, embedding: nn.Embedding, kind: str, weight: nn.Parameter, dtype: torch.dtype):
        super().__init__()
        self.num_embeddings, self.embedding_dim = embedding.weight.shape
        self.kind, self.weight, self.dtype = kind, weight, dtype
        # As the family has it, for `unpack_modules`; no module of this one, and its table has no memory.
        self.__dict__["embedding"] = embedding
        # What some families multiply embeddings with.
        self.embed_scale: Tensor | None
        self.register_buffer("embed_scale", getattr(embedding, SCALE, None), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """``[...]`` tokens to ``[..., width]``."""
        rows = unpack(self.weight[ids.reshape(-1)], self.kind).to(self.dtype)
        rows = rows if self.embed_scale is None else rows * self.embed_scale.to(self.dtype)
        return rows.reshape(*ids.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, blocks of {self.kind}"


def packable_weights(model: nn.Module) -> dict[str, torch.Size]:
    """Shapes of the weights that may stay packed, by name: those of linears and embeddings, but of no router.

    A weight that several modules share is one of them where all may hold it so.
    """
    found: dict[str, torch.Size] = {}
    refused: set[int] = set()
    for path, module in model.named_modules():
        for leaf, parameter in module._parameters.items():
            if leaf == "weight" and _is_packable(path, module):
                found[f"{path}.{leaf}"] = module.weight.shape
            elif parameter is not None:
                refused.add(id(parameter))
    return {name: shape for name, shape in found.items() if id(model.get_parameter(name)) not in refused}


def _is_packable(path: str, module: nn.Module) -> bool:
    if isinstance(module, nn.Embedding):
        return type(module) is nn.Embedding or (type(module).__name__.endswith(SCALED) and hasattr(module, SCALE))
    return type(module) in (nn.Linear, RowParallelLinear) and path.rpartition(".")[2] not in ROUTERS


def pack_modules(model: nn.Module, kinds: Mapping[str, str], dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Put modules with packed weights, without memory, in the places of those that hold the weights named.

    Embeddings come in `dtype`. Returns the type of these weights by name.
    """
    shared: dict[int, nn.Parameter] = {}
    experts = {name: kind for name, kind in kinds.items() if is_experts(model.get_submodule(name.rpartition(".")[0]))}
    pack_experts(model, experts)
    for name, kind in kinds.items():
        if name in experts:
            continue
        path = name.rpartition(".")[0]
        module: Any = model.get_submodule(path)
        weight = module.weight
        packed = shared.setdefault(id(weight), packed_parameter(weight.shape, kind))
        if isinstance(module, nn.Embedding):
            model.set_submodule(path, PackedEmbedding(module, kind, packed, dtype))
        else:
            model.set_submodule(path, PackedLinear(module, kind, packed))
    return dict.fromkeys(kinds, torch.uint8)


def unpack_modules(model: nn.Module, dtype: torch.dtype) -> None:
    """Put plain linears and embeddings in the places of packed ones, with their weights rounded to `dtype` alone.

    For one rank that holds all of a model.
    """
    unpack_experts(model, dtype)
    shared: dict[int, nn.Parameter] = {}
    for path, module in [*model.named_modules()]:
        if not isinstance(module, PackedLinear | PackedEmbedding):
            continue
        weight = shared.get(id(module.weight))
        if weight is None:
            weight = nn.Parameter(unpack(module.weight, module.kind).to(dtype), requires_grad=False)
            shared[id(module.weight)] = weight
        plain: nn.Linear | nn.Embedding
        if isinstance(module, PackedLinear):
            plain = nn.Linear(1, 1, bias=False, device="meta")
            plain.out_features, plain.in_features, plain.bias = module.out_features, module.in_features, module.bias
        else:
            plain = cast(nn.Embedding, module.embedding)
        plain.weight = weight
        model.set_submodule(path, plain)


def check_blocks(
    kinds: Mapping[str, str], placement: Mapping[str, SliceSpec], shapes: Mapping[str, torch.Size], tp_size: int
) -> None:
    """Refuse a tensor-parallel degree that cuts rows of a weight inside a block.

    `kinds` and `shapes` have the block types of packed weights, and what they stand for, by name.
    """
    for name, kind in kinds.items():
        spec, size, width = placement[name], BLOCKS[kind].elements, shapes[name][-1]
        by_columns = spec.dim == len(shapes[name]) - 1
        if by_columns and any(end % size for ends in spec.ranges or () for end in ends):
            fitting = [str(tp) for tp in range(1, tp_size) if width % (tp * size) == 0]
            raise CombinationError(
                "whole",
                f"tensor_parallel.tp_size = {tp_size} cuts the rows of {name}, {width} weights, inside blocks of "
                f"{kind}, {size} weights each; sizes that do not: {', '.join(fitting)}; more ranks share the work by "
                "megakv.context_parallel.size",
            )
