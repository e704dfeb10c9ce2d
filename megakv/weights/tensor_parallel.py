"""Turning a model into one tensor-parallel rank's share of it, before it has any memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from megakv.weights.placement import HeadMap, HeadShard, SliceSpec
from megakv.weights.placement.attention import find_attention
from megakv.weights.placement.plan import decoder_layers, is_experts

AllReduce = Callable[[Tensor], Tensor]

# The names under which attention modules of transformers 5.17 to 5.23 keep their head counts for reshaping.
QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads")
KV_COUNTS = ("num_key_value_heads", "num_kv_heads")
WIDTHS = ("intermediate_dim", "intermediate_size")


class RowParallelLinear(nn.Module):
    """A linear ``[out, in_local]`` whose input dimension is spread over ranks.

    Their outputs are summed by `all_reduce`, in place or not. The bias is whole on every rank and added after the sum.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, all_reduce: AllReduce):
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.all_reduce = all_reduce

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_local]`` to ``[..., out]``."""
        out = self.all_reduce(F.linear(x, self.weight))
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features} of this rank, out_features={self.out_features}"


class LocalHeads:
    """A model's config as an attention module sees it that reads its head counts there.

    Everything but the head counts is the config's own, also when that changes later.
    """

    def __init__(self, config: Any, **counts: int):
        self.__dict__.update(counts)
        self._whole = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_whole"], name)


def _empty(parameter: Tensor, spec: SliceSpec) -> nn.Parameter:
    shape = spec.shape(parameter.shape)
    return nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta"), requires_grad=False)


def _shrink_linear(parent: nn.Module, child: str, specs: dict[str, SliceSpec], all_reduce: AllReduce) -> None:
    linear: Any = getattr(parent, child)
    cut = specs["weight"]
    weight = _empty(linear.weight, cut)
    bias = None if linear.bias is None else _empty(linear.bias, specs["bias"])
    if cut.dim == 1:
        setattr(parent, child, RowParallelLinear(weight, bias, all_reduce))
        return
    linear.weight, linear.bias = weight, bias
    linear.out_features = weight.shape[0]


def _shrink_attention(attention: nn.Module, heads: HeadMap, shard: HeadShard) -> None:
    """Make a module's own idea of its head counts local; `head_shard` says which heads they are."""
    module: Any = attention
    for names, whole, local in (
        (QUERY_COUNTS, heads.n_heads, len(shard.query_heads)),
        (KV_COUNTS, heads.n_kv_heads, len(shard.kv_heads)),
    ):
        for name in names:
            if getattr(module, name, None) == whole:
                setattr(module, name, local)
    if hasattr(module, "num_key_value_groups"):
        module.num_key_value_groups = shard.group_size
    if hasattr(module, "qkv_proj"):
        module.config = LocalHeads(
            module.config, num_attention_heads=len(shard.query_heads), num_key_value_heads=len(shard.kv_heads)
        )
    module.head_shard = shard


def _shrink_experts(experts: nn.Module, all_reduce: AllReduce) -> None:
    module: Any = experts
    whole = [getattr(module, name, None) for name in WIDTHS]
    local = module.down_proj.shape[1 if module.is_transposed else 2]
    for name, value in zip(WIDTHS, whole, strict=True):
        if value is not None:
            setattr(module, name, local)
    experts.register_forward_hook(lambda _module, _inputs, output: all_reduce(output))


def shard_structure(
    model: PreTrainedModel,
    placement: dict[str, SliceSpec],
    head_map: HeadMap,
    tp_rank: int,
    all_reduce: AllReduce,
) -> None:
    """Give every cut parameter its local shape on the meta device, and put the sums over ranks in their places.

    Row-parallel linears become `RowParallelLinear`, column-parallel ones stay what they are with fewer outputs, experts
    get a hook that sums their output, and each attention module learns its local head counts and gets the attribute
    `head_shard` (`HeadShard`). Values must be filled in afterwards. `placement` is that of this map and rank.
    """
    if head_map.tp_size == 1:
        return
    prefix, layers = decoder_layers(model)
    model_type = model.config.get_text_config().model_type
    attentions = [find_attention(layer, model_type) for layer in layers]
    for index, layer in enumerate(layers):
        for name, module in list(layer.named_modules()):
            here = ".".join(part for part in (prefix, str(index), name) if part)
            for child, linear in list(module.named_children()):
                specs = {
                    kind: placement[f"{here}.{child}.{kind}"] for kind, _ in linear.named_parameters(recurse=False)
                }
                if isinstance(linear, nn.Linear) and specs["weight"].ranges is not None:
                    _shrink_linear(module, child, specs, all_reduce)
            if isinstance(module, (nn.Linear, RowParallelLinear)):
                continue
            for child, parameter in list(module.named_parameters(recurse=False)):
                if placement[f"{here}.{child}"].ranges is not None:
                    setattr(module, child, _empty(parameter, placement[f"{here}.{child}"]))
            if is_experts(module):
                _shrink_experts(module, all_reduce)
        _shrink_attention(attentions[index][1], head_map, head_map.shard(index, tp_rank))
