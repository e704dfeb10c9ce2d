"""Turning a model into one tensor-parallel rank's share of it, before it has any memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from megakv.weights.placement import HeadMap, HeadShard, SliceSpec
from megakv.weights.placement.attention import KEY_NORMS, LATENT, QUERY_NORMS, find_attention, is_rms_norm
from megakv.weights.placement.plan import are_transposed, decoder_layers, is_experts

AllReduce = Callable[[Tensor], Tensor]

# The names under which attention modules of transformers 5.17 to 5.23 keep their head counts for reshaping.
QUERY_COUNTS = ("num_heads", "num_attention_heads", "n_heads")
KV_COUNTS = ("num_key_value_heads", "num_kv_heads")
WIDTHS = ("intermediate_dim", "intermediate_size")


class RowParallelLinear(nn.Linear):
    """A linear ``[out, in_local]`` whose input dimension is spread over ranks.

    Their outputs are summed by `all_reduce`, in place or not. The bias is whole on every rank and added after the sum.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, all_reduce: AllReduce):
        super().__init__(weight.shape[1], weight.shape[0], bias=False, device="meta")
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))
        self.all_reduce = all_reduce

    def forward(self, x: Tensor) -> Tensor:
        """``[..., in_local]`` to ``[..., out]``."""
        out = self.all_reduce(F.linear(x, self.weight))
        return out if self.bias is None else out + self.bias


class NormOverHeads(nn.Module):
    """An RMS norm over all heads of queries or keys at once (OLMo 2), of which this rank has some.

    The sum of squares goes over all of the model's `heads`; one that several ranks hold is counted on the first, as
    `counted` says of each head that is here.
    """

    def __init__(self, norm: Any, counted: tuple[bool, ...], heads: int, all_reduce: AllReduce):
        super().__init__()
        self.weight, self.variance_epsilon = norm.weight, norm.variance_epsilon
        self.heads, self.all_reduce = heads, all_reduce
        self.counted = [index for index, first in enumerate(counted) if first]
        self.local_heads = len(counted)

    def forward(self, x: Tensor) -> Tensor:
        """``[..., K * D]`` of this rank's heads to the same."""
        wide = x.to(torch.float32)
        by_head = wide.unflatten(-1, (self.local_heads, -1)).square().mean(-1)
        if len(self.counted) < self.local_heads:
            by_head = by_head[..., self.counted]
        mean = self.all_reduce(by_head.sum(-1, keepdim=True)) / self.heads
        return (self.weight * (wide * torch.rsqrt(mean + self.variance_epsilon))).to(x.dtype)


class LocalHeads:
    """A model's config as an attention module sees it that reads its head counts there.

    Everything but the head counts is the config's own, also when that changes later.
    """

    def __init__(self, config: Any, **counts: int):
        self.__dict__.update(counts)
        self._whole = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_whole"], name)


def _shrink_attention(attention: nn.Module, heads: HeadMap, shard: HeadShard) -> None:
    """Make a module's own idea of its head counts local; `head_shard` says which heads they are."""
    module: Any = attention
    queries, keys = len(shard.query_heads), len(shard.kv_heads)
    for names, whole, local in ((QUERY_COUNTS, heads.n_heads, queries), (KV_COUNTS, heads.n_kv_heads, keys)):
        for name in names:
            if getattr(module, name, None) == whole:
                setattr(module, name, local)
    if hasattr(module, "num_key_value_groups") and not hasattr(module, LATENT):
        module.num_key_value_groups = shard.group_size
    if hasattr(module, "qkv_proj"):
        module.config = LocalHeads(module.config, num_attention_heads=queries, num_key_value_heads=keys)
    module.head_shard = shard


def _share_norms(
    attention: nn.Module, cut: set[nn.Module], heads: HeadMap, layer: int, tp_rank: int, all_reduce: AllReduce
) -> None:
    """Let an attention module's norms over all heads, which were `cut`, know the heads of other ranks."""
    queries, keys = heads.first_here(layer, tp_rank)
    for names, count, counted in (QUERY_NORMS, heads.n_heads, queries), (KEY_NORMS, heads.n_kv_heads, keys):
        for name in names:
            norm = getattr(attention, name, None)
            if norm in cut:
                setattr(attention, name, NormOverHeads(norm, counted, count, all_reduce))


def shard_structure(
    model: PreTrainedModel,
    placement: dict[str, SliceSpec],
    head_map: HeadMap,
    tp_rank: int,
    all_reduce: AllReduce,
) -> None:
    """Give every cut parameter its local shape on the meta device, and put the sums over ranks in their places.

    Row-parallel linears become `RowParallelLinear`, column-parallel ones stay what they are with fewer outputs, experts
    get a hook that sums their output, norms over all heads become `NormOverHeads`, and each attention module learns its
    local head counts and gets the attribute `head_shard` (`HeadShard`). Values must be filled in afterwards.
    `placement` is that of this map and rank.
    """
    if head_map.tp_size == 1:
        return
    model_type = model.config.get_text_config().model_type
    attentions = [find_attention(layer, model_type)[1] for layer in decoder_layers(model)[1]]
    norms: set[nn.Module] = set()
    for name, spec in placement.items():
        if spec.ranges is None:
            continue
        path, _, leaf = name.rpartition(".")
        owner: Any = model.get_submodule(path)
        whole = getattr(owner, leaf)
        cut = nn.Parameter(torch.empty(spec.shape(whole.shape), dtype=whole.dtype, device="meta"), requires_grad=False)
        if isinstance(owner, nn.Linear) and spec.dim == 1:
            model.set_submodule(path, RowParallelLinear(cut, owner.bias, all_reduce))
            continue
        setattr(owner, leaf, cut)
        if isinstance(owner, nn.Linear):
            owner.out_features = len(cut)
        elif cut.ndim == 1 and is_rms_norm(owner):
            norms.add(owner)
    for module in model.modules():
        if is_experts(module):
            experts: Any = module
            for name in WIDTHS:
                if getattr(experts, name, None) is not None:
                    setattr(experts, name, experts.down_proj.shape[1 if are_transposed(experts) else 2])
            experts.register_forward_hook(lambda _module, _inputs, output: all_reduce(output))
    for index, attention in enumerate(attentions):
        _shrink_attention(attention, head_map, head_map.shard(index, tp_rank))
        _share_norms(attention, norms, head_map, index, tp_rank, all_reduce)
