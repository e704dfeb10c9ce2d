"""What becomes of a layer's cached tokens, and the plan of a step, which is made of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True)
class Split:
    """What becomes of `tokens` cached tokens, s'.

    The first `recomputed` ones (the split point l) come from their activations, in chunks of `chunk` tokens; the host
    attends to `on_host` where they lie; `resident` ones never leave the accelerator.
    """

    tokens: int
    recomputed: int = 0
    on_host: int = 0
    resident: int = 0
    chunk: int = 0

    @property
    def streamed(self) -> int:
        """Tokens whose keys and values are sent."""
        return self.tokens - self.recomputed - self.on_host - self.resident

    @property
    def chunks(self) -> int:
        """Transfers that activations come in."""
        return -(-self.recomputed // self.chunk) if self.recomputed else 0

    def of_tokens(self, tokens: int) -> Split:
        """The same parts of another number of tokens, in a layer that sees more or fewer of them."""
        part = tokens / self.tokens if self.tokens else 0.0
        counts = {name: round(part * getattr(self, name)) for name in ("recomputed", "on_host", "resident")}
        return replace(self, tokens=tokens, **counts)


class Plan(NamedTuple):
    """A method's split for each group of sequences that a layer attends to, and how long a step takes that way.

    `seconds` is what the costs say, from step to step; `predicted_s` the same, corrected by what steps of it took.
    """

    name: str
    splits: tuple[Split, ...]
    seconds: float
    predicted_s: float

    @property
    def chunk(self) -> int:
        """Tokens of a chunk of activations, at most."""
        return max(each.chunk for each in self.splits)

    @property
    def total(self) -> Split:
        """Of all groups together."""
        names = ("tokens", "recomputed", "on_host", "resident")
        tokens, recomputed, on_host, resident = (sum(getattr(each, name) for each in self.splits) for name in names)
        return Split(tokens, recomputed, on_host, resident, self.chunk)

    def differs(self, other: Plan) -> bool:
        """Whether it treats tokens otherwise than another plan.

        With the freedom to do what does not pay, a plan is no other plan: it divides tokens in the same ways, only by
        costs that other steps showed. Recomputing in chunks is another way than recomputing all at once.
        """

        def counts(plan: Plan) -> list[tuple[int, int, int]]:
            return [(each.recomputed, each.chunks, each.on_host) for each in plan.splits]

        def ways(plan: Plan) -> tuple[bool, bool, bool]:
            total = plan.total
            return total.recomputed > 0, total.on_host > 0, total.recomputed > 0 and plan.name == "kvpr"

        return counts(self) != counts(other) and ways(self) != ways(other)


def spread(total: int, limits: Sequence[int]) -> list[int]:
    """Shares with a given sum, as equal as each one's limit allows; `total` is at most the sum of the limits."""
    assert 0 <= total <= sum(limits)
    shares = [0] * len(limits)
    left = total
    order = sorted(range(len(limits)), key=lambda index: limits[index])
    for place, index in enumerate(order):
        shares[index] = min(limits[index], -(-left // (len(order) - place)))
        left -= shares[index]
    return shares
