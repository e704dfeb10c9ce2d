"""Attention modules of MegaKV in the place of a model's own, for families that bypass the attention interface."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megakv.attention.reference import Scoring
from megakv.errors import MegaKVError
from megakv.injection.interface import described_mask, runtime_of

Projected = tuple[Tensor, Tensor, Tensor, Scoring]
"""``[1, H, L, D]``, ``[1, K, L, D]`` and ``[1, K, L, Dv]`` of this rank's packed tokens, and how they are scored."""


class SubstitutedAttention(nn.Module):
    """The children of an attention module under their own names, and another way from them to the output.

    Weights stay the same objects with the same names in the state dict. Head counts come from their shapes, which
    tensor parallelism has cut to this rank's heads, and never from the config.
    """

    family: ClassVar[type[nn.Module]]
    """Class of the modules that it stands in for."""
    output: ClassVar[str]
    """Name of the projection behind attention."""

    def __init__(self, original: nn.Module, config: Any):
        super().__init__()
        for name, child in original.named_children():
            self.add_module(name, child)
        module: Any = original
        self.layer_idx: int = module.layer_idx
        self.head_dim: int = module.head_dim
        # Which heads of the whole model these are; absent where all heads are here.
        self._head_shard: Any = getattr(module, "head_shard", None)
        # Not a child: its weights are counted once.
        self._original = (original,)
        self.train(original.training)

    @classmethod
    def check(cls, config: Any) -> None:
        """Refuse what a model's config asks for and the family's modules here do not do: a ValueError says what."""

    def project(self, hidden_states: Tensor, inputs: dict[str, Any]) -> Projected:
        """Queries, keys and values of ``[1, L, hidden]``, from what the model gives to the family's modules.

        Biases that a model built for a whole sequence in order are among the inputs, and no use.
        """
        raise NotImplementedError

    def forward(
        self, hidden_states: Tensor, residual: Tensor | None = None, *, attention_mask: Tensor | None, **inputs: Any
    ) -> tuple[Tensor, None]:
        """``[1, L, hidden]`` to the same."""
        query, key, value, scoring = self.project(hidden_states, inputs)
        if described_mask(self, attention_mask).window is not None:
            raise MegaKVError(f"the model asks for a sliding window, which {type(self).__name__} does not have")
        attended = runtime_of(self).attend(self.layer_idx, query, key, value, scoring, None)
        out = self.child(self.output)(attended.flatten(2))
        return out if residual is None else out + residual, None

    @property
    def original(self) -> nn.Module:
        """What it stands in for."""
        return self._original[0]

    def child(self, name: str) -> Any:
        """A child by its name."""
        return getattr(self, name)

    def local(self, per_head: Tensor) -> Tensor:
        """The rows of this rank's query heads of a ``[H, ...]`` tensor of all heads, on the weights' device."""
        device = next(self.parameters()).device
        if self._head_shard is not None:
            per_head = per_head[torch.tensor(self._head_shard.query_heads, device=per_head.device)]
        return per_head.to(device)


def substitute_attention(model: PreTrainedModel, kind: type[SubstitutedAttention]) -> None:
    """Put new modules in the place of a model's; its class stays, as do modules that were replaced before."""
    kind.check(model.config)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, kind.family):
                setattr(parent, name, kind(child, model.config))
