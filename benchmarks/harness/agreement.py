"""Methods are only compared if they compute the same."""

from __future__ import annotations

from torch import Tensor

from megakv.errors import MegaKVError

from .world import World

TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2, "fp16": 1e-2}
"""How far the logits of two methods may lie apart, relative to the largest logit."""


class Agreement:
    """Logits of one computation by several methods; the first one's are what the others must equal."""

    def __init__(self, world: World, dtype: str):
        self._world = world
        self._tolerance = TOLERANCE[dtype]
        self._first: tuple[str, Tensor] | None = None

    def check(self, name: str, logits: Tensor | None) -> float:
        """The largest difference from the first method's logits over all ranks, relative to the largest logit."""
        if self._first is None:
            assert logits is not None
            self._first = name, logits.float()
        first, expected = self._first
        own = 0.0 if logits is None else float((logits.float() - expected).abs().max() / expected.abs().max())
        difference = max(self._world.gather(own))
        if not difference <= self._tolerance:
            raise MegaKVError(f"{name}: logits differ from those of {first} by {difference:.1e} of the largest")
        return difference
