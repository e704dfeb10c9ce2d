"""Keys as if their tokens stood further on: for caches in which a token's position is its place among what is held.

With rotary embeddings only distances count, so it is enough to rotate the keys of the few tokens that lie before a gap;
with ALiBi (see `megakv.cache.ragged_attention.RaggedPart`) there is nothing to rotate. Which columns of a key form
pairs is the family's own function's to know; that it is understood is seen by computing keys at two positions.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from megakv.base.errors import CombinationError
from megakv.injection.families import SubstitutedForward
from megakv.injection.interface import ATTEND_ATTRIBUTE, CausalMask, stopped_at_attention
from megakv.injection.policy import depends_on_length

FUNCTION = "apply_rotary_pos_emb"
POSITIONS = (5, 11)
"""At which keys are compared."""
TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4}
"""Of their differences, relative to the largest; others are in 16 bits."""


class KeyRotation:
    """Rotates keys of a model's layers; whether it can is looked at when it is first asked, or by `check`."""

    def __init__(self, model: PreTrainedModel):
        self._model = model
        # By layer; None where it rotates no keys.
        self._modules: dict[int, Any] | None = None

    def check(self) -> None:
        """A ValueError where positions of cached keys cannot be moved. Every tensor-parallel rank must call it."""
        if self._modules is None:
            every: list[Any] = [each for each in self._model.modules() if hasattr(each, ATTEND_ATTRIBUTE)]
            with torch.no_grad():
                self._modules = {each.layer_idx: each if self._understood(each) else None for each in every}

    def __call__(self, layer: int, keys: Tensor, shift: int) -> Tensor:
        """``[n, D]`` keys, after rotary, of tokens so many positions further on."""
        self.check()
        assert self._modules is not None
        module = self._modules[layer]
        return keys if module is None or not len(keys) else self._rotated(module, keys, shift)

    def _understood(self, module: Any) -> bool:
        """Whether an attention module rotates its keys; a ValueError where that cannot be told."""
        forward = vars(module).get("forward")
        if isinstance(forward, SubstitutedForward) and forward.slopes is not None:
            return False
        if depends_on_length(self._model):
            raise self._refusal("its rotary frequencies follow the length")
        if self._rotary() is None:
            raise self._refusal("what it caches holds positions that cannot be moved")
        try:
            first, second = (self._keys(module, position) for position in POSITIONS)
            found = self._rotated(module, first[:, 0], POSITIONS[1] - POSITIONS[0])
        except (TypeError, AttributeError, KeyError, IndexError, RuntimeError, ValueError) as error:
            raise self._refusal("its rotary embeddings are not understood") from error
        bound = TOLERANCE.get(first.dtype, 0.05) * float(first.abs().max())
        if float((first - second).abs().max()) == 0:
            return False
        if not float((found - second[:, 0]).abs().max()) <= bound:
            raise self._refusal("its rotary embeddings are not understood")
        return True

    def _refusal(self, reason: str) -> CombinationError:
        return CombinationError(
            "inputs",
            f"megakv.fairkv.method = 'streaming_llm' with megakv.fairkv.decode_interval is not supported for "
            f"{self._model.config.model_type!r}: tokens count by their place in the cache, and {reason}; use another "
            "method, or leave decode_interval out",
        )

    def _rotary(self) -> Any:
        """The only module of rotary embeddings."""
        found = [module for module in self._model.modules() if isinstance(getattr(module, "inv_freq", None), Tensor)]
        return found[0] if len(found) == 1 else None

    def _embeddings(self, position: int, kind: torch.dtype) -> tuple[Tensor, ...]:
        rotary = self._rotary()
        device = rotary.inv_freq.device
        where = torch.tensor([[position]], device=device)
        found: tuple[Tensor, ...] = rotary(torch.zeros(1, dtype=kind, device=device), where)
        return found

    def _keys(self, module: nn.Module, position: int) -> Tensor:
        """``[K, 1, D]`` of one made-up token at a position."""
        weight = next(module.parameters())
        size = self._model.config.get_text_config().hidden_size
        random = torch.Generator().manual_seed(0)
        hidden = torch.randn(1, 1, size, generator=random).to(weight.device, self._model.dtype)
        known = {
            "attention_mask": CausalMask(),
            "position_embeddings": self._embeddings(position, hidden.dtype),
            "position_ids": torch.tensor([[position]], device=weight.device),
        }
        names = inspect.signature(module.forward).parameters
        given = {name: value for name, value in known.items() if name in names or "inputs" in names}
        # Weights that lie on the host have no memory here; others of their shape do as well.
        away = [(each, each.data) for each in module.parameters() if each.data.untyped_storage().nbytes() < each.nbytes]
        try:
            for parameter, _ in away:
                values = torch.randn(parameter.shape, generator=random) / parameter.shape[-1] ** 0.5
                parameter.data = values.to(parameter.device, parameter.dtype)
            return stopped_at_attention(module, hidden, **given)[0]
        finally:
            for parameter, data in away:
                parameter.data = data

    def _rotated(self, module: nn.Module, keys: Tensor, shift: int) -> Tensor:
        kind = torch.promote_types(keys.dtype, torch.float32)
        cos, sin = self._embeddings(shift, kind)
        # Some families lengthen keys by a factor as they rotate them: those are lengthened already.
        factor = getattr(self._rotary(), "attention_scaling", 1.0)
        cos, sin = (part.to(keys.device) / factor for part in (cos, sin))
        function = getattr(sys.modules[type(module).__module__], FUNCTION)
        rows = keys.to(kind)[None, None]
        try:
            rotated = function(rows, rows, cos, sin)[1]
        except RuntimeError:
            # Of fewer columns: the attention module takes the first ones.
            width = cos.shape[-1]
            part = rows[..., :width]
            rotated = torch.cat([function(part, part, cos, sin)[1], rows[..., width:]], dim=-1)
        return rotated[0, 0].to(keys.dtype)
