"""What ranks must hold of a mapping: of the worst single prompt, not of the mean, and the weights of the heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megakv.cache.layer import LayerMapping
from megakv.cache.splitting import split_heads
from megakv.costmodel.shape import ModelShape
from megakv.fairkv.capacity import CLOSE, level_ranks, loads_of
from megakv.fairkv.profile import BudgetProfile

Mappings = list[LayerMapping]
TRIES = 8
"""Caps of the mean that mappings are found under, each lower than the one before, until the worst prompt fits; and ways
to number the ranks of each.
"""


@dataclass(frozen=True)
class RankMemory:
    """The memory of `tp_size` ranks, in tokens of one KV head: a cap, and what each head that a rank holds takes of it
    for its weights.
    """

    profile: BudgetProfile
    tp_size: int
    cap: float
    head_tokens: float
    given: str  # The setting and its value, as errors name them.
    token_bytes: float | None = None  # Of a token of all sequences, where the cap was given in bytes.
    fixed: Sequence[float] = ()  # By layer, as requests are divided with them (`HeadMapping.head_tokens`).

    @classmethod
    def in_tokens(cls, profile: BudgetProfile, tp_size: int, cap: float) -> RankMemory:
        """A cap of tokens of one sequence; weights do not count."""
        return cls(profile, tp_size, cap, 0.0, f"memory_cap = {cap:g} tokens")

    @classmethod
    def in_bytes(cls, profile: BudgetProfile, tp_size: int, cap: float, model: ModelShape, batch: int) -> RankMemory:
        """A cap of bytes, of the heads' weights and of what `batch` sequences keep."""
        dims = model.key_dim + model.value_dim
        token = batch * dims * model.element_bytes
        # Queries and outputs of the group, key and value.
        weights = model.hidden * (model.heads // model.cached_heads + 1) * dims * model.element_bytes
        return cls(profile, tp_size, cap / token, weights / token, f"memory_cap_bytes = {cap:g}", token)

    def held(self, mappings: Sequence[LayerMapping]) -> NDArray[np.float64]:
        """``[prompts, layers, ranks]`` tokens that ranks hold of each prompt, which replicas share in the way that is
        best for it; of the mean where no prompts are known.
        """
        size, profile = self.tp_size, self.profile
        weights = np.array([[sum(rank in at for at in each.ranks) for rank in range(size)] for each in mappings])
        kept = [loads_of(mappings, profile.budgets, size)] if profile.prompts is None else []
        fixed = self.fixed or [0.0] * len(mappings)
        for prompt in profile.prompts or ():
            own = [
                mapping.with_shares(split_heads(row, mapping.ranks, size, fixed=each)[1])
                for mapping, row, each in zip(mappings, prompt, fixed, strict=True)
            ]
            kept.append(loads_of(own, prompt, size))
        return np.array(kept) + weights * self.head_tokens

    def within(
        self, mapped: Callable[[float], tuple[Mappings, float]], plain: Mappings | None
    ) -> tuple[Mappings, float]:
        """Mappings, and their bound, that ranks can hold: `mapped` finds some under a cap of the mean's tokens; if it
        finds none, the `plain` ones are tried.

        A ValueError says what the mappings found need.
        """
        cap, best, lowest = self.cap, float("inf"), 0.0
        least: ValueError | None = None
        for _ in range(TRIES):
            try:
                mappings, bound = mapped(cap)
            except ValueError as error:
                if self.token_bytes is None and best == float("inf"):
                    least = error
                break
            # What is true under the cap that was given is true of all that fits.
            lowest = lowest or bound
            mappings, used = self._levelled(mappings)
            if used <= self.cap * (1 + CLOSE):
                return mappings, lowest
            best = min(best, used)
            cap = min(cap, self.cap) - (used - self.cap)
            if cap <= 0:
                break
        if plain is not None:
            mappings, used = self._levelled(plain)
            if used <= self.cap * (1 + CLOSE):
                return mappings, lowest
            best = min(best, used)
        if least is not None:
            raise least
        raise ValueError(f"{self.given} on each of {self.tp_size} ranks {self._needed(best)}")

    def _levelled(self, mappings: Mappings) -> tuple[Mappings, float]:
        """Ranks renumbered, which costs no time, until those of the worst prompt hold equally much; and the fullest."""
        best, found = float("inf"), mappings
        for _ in range(TRIES):
            held = self.held(mappings)
            totals = held.sum(axis=1).max(axis=1)
            if totals.max() >= best:
                break
            best, found = float(totals.max()), mappings
            if best <= self.cap * (1 + CLOSE):
                break
            orders = level_ranks(held[totals.argmax()], self.cap)
            mappings = [each.renumbered(order.tolist()) for each, order in zip(mappings, orders, strict=True)]
        return found, best

    def _needed(self, best: float) -> str:
        remedy = "use more ranks, fewer copies or smaller budgets"
        if best == float("inf"):
            return f"leaves no room for what heads keep; raise it, or {remedy}"
        if self.token_bytes is not None:
            of, amount = "weights of heads and the worst prompt", f"{best * self.token_bytes:.6g} bytes"
        else:
            of, amount = "the worst prompt", f"{best:.6g} tokens"
        return f"cannot be met by any mapping found: with {of} the fullest rank needs {amount}; raise it, or {remedy}"
