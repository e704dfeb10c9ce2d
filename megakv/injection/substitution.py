"""Attention modules of MegaKV in the place of a model's own, for families that bypass the attention interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megakv.attention.partial import Scoring
from megakv.errors import MegaKVError
from megakv.injection.interface import is_causal_mark, runtime_of


class SubstitutedAttention(nn.Module):
    """The children of an attention module under their own names, and another way from them to the output.

    Weights stay the same objects with the same names in the state dict. Head counts come from their shapes, which
    tensor parallelism has cut to this rank's heads, and never from the config.

    Parameters
    ----------
    original : nn.Module
        The family's attention module.
    """

    def __init__(self, original: nn.Module):
        super().__init__()
        for name, child in original.named_children():
            self.add_module(name, child)
        module: Any = original
        self.layer_idx: int = module.layer_idx
        self.head_dim: int = module.head_dim
        # Which heads of the whole model these are; absent where all heads are here.
        self.head_shard: Any = getattr(module, "head_shard", None)
        # Not a child: its weights are counted once.
        self._original = (original,)
        self.train(original.training)

    @property
    def original(self) -> nn.Module:
        """What it stands in for."""
        return self._original[0]

    def attend(
        self, q_BHSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, scoring: Scoring, attention_mask: Tensor | None
    ) -> Tensor:
        """``[1, L, H * Dv]`` attention of this rank's packed tokens over all ranks.

        Raises
        ------
        MegaKVError
            If the model made a mask of its own, or the module belongs to no engine.
        """
        if not is_causal_mark(attention_mask):
            raise MegaKVError(
                f"{type(self).__name__} got an attention mask that did not come from transformers' mask interface; "
                "only causal attention is supported"
            )
        return runtime_of(self).attend(self.layer_idx, q_BHSD, k_BKSD, v_BKSD, scoring, None).flatten(2)

    def local(self, per_head: Tensor) -> Tensor:
        """The rows of this rank's query heads of a ``[H, ...]`` tensor of the whole model's heads."""
        if self.head_shard is None:
            return per_head
        return per_head[torch.tensor(self.head_shard.query_heads, device=per_head.device)]


def substitute_attention(
    model: PreTrainedModel, family: type[nn.Module], build: Callable[[nn.Module], SubstitutedAttention]
) -> list[nn.Module]:
    """Put a new module in the place of every attention module of a family.

    Parameters
    ----------
    model : PreTrainedModel
        Changed in place; its class and transformers' code are not.
    family : type
        Class of the attention modules to replace. Modules replaced before stay.
    build : callable
        Makes the new module from the old one.

    Returns
    -------
    list[nn.Module]
        The modules now in place, layer after layer.
    """
    placed: list[nn.Module] = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, family):
                child = build(child)
                setattr(parent, name, child)
            if isinstance(child, SubstitutedAttention):
                placed.append(child)
    return placed


def split_groups(fused_BSW: Tensor, *, heads: int, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Take apart a projection laid out as ``[K, H / K + 2, D]``: a KV head's queries, then its key and its value.

    BLOOM's ``[H, 3, D]`` and multi-query Falcon's ``[H + 2, D]`` are special cases.

    Parameters
    ----------
    fused_BSW : Tensor
        ``[B, S, (H + 2 K) * D]``.
    heads, head_dim : int
        H and D; K follows from the width.

    Returns
    -------
    tuple of Tensor
        ``[B, H, S, D]``, ``[B, K, S, D]`` and ``[B, K, S, D]``.
    """
    batch, length, width = fused_BSW.shape
    kv_heads = (width // head_dim - heads) // 2
    assert kv_heads > 0 and heads % kv_heads == 0 and (heads + 2 * kv_heads) * head_dim == width
    grouped = fused_BSW.view(batch, length, kv_heads, heads // kv_heads + 2, head_dim)
    query = grouped[..., :-2, :].flatten(2, 3)
    return query.transpose(1, 2), grouped[..., -2, :].transpose(1, 2), grouped[..., -1, :].transpose(1, 2)
