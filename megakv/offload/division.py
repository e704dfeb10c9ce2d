"""What becomes of a layer's cached tokens, and the plan of a step, which is made of that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Division:
    """What becomes of a layer's cached tokens.

    Parameters
    ----------
    tokens : int
        All of them, s'.
    recomputed : int
        The split point l: the first tokens are recomputed from their activations.
    on_host : int
        Tokens that the host attends to where they lie.
    resident : int
        Tokens whose keys and values stay on the accelerator.
    seconds : float
        Predicted time of the layer.
    """

    tokens: int
    recomputed: int = 0
    on_host: int = 0
    resident: int = 0
    seconds: float = 0.0

    @property
    def streamed(self) -> int:
        """Tokens whose keys and values are sent."""
        return self.tokens - self.recomputed - self.on_host - self.resident

    def of_tokens(self, tokens: int) -> Division:
        """The same parts of another number of tokens, in a layer that sees more or fewer of them."""
        part = tokens / self.tokens if self.tokens else 0.0
        return Division(tokens, round(part * self.recomputed), round(part * self.on_host), round(part * self.resident))


def together(divisions: Sequence[Division]) -> Division:
    """What becomes of the tokens of several groups, one behind the other."""
    return Division(
        sum(each.tokens for each in divisions),
        sum(each.recomputed for each in divisions),
        sum(each.on_host for each in divisions),
        sum(each.resident for each in divisions),
        sum(each.seconds for each in divisions),
    )


class Plan(NamedTuple):
    """What becomes of a layer's cached tokens, group by group, and how long a step takes that way.

    Parameters
    ----------
    name : str
        The method that it comes from; ``all`` where activations are recomputed and the host attends.
    divisions : tuple of Division
        Of each group of sequences that a layer attends to.
    chunk : int
        Tokens of a chunk of activations.
    seconds : float
        From step to step, as the costs have it.
    predicted_s : float
        The same, corrected by what steps of this plan took.
    """

    name: str
    divisions: tuple[Division, ...]
    chunk: int
    seconds: float
    predicted_s: float

    @property
    def division(self) -> Division:
        """Of all groups together."""
        return together(self.divisions)

    @property
    def shape(self) -> tuple[tuple[int, int, int], ...]:
        """What tells two plans apart: tokens recomputed, in how many chunks, and tokens on the host, by group."""
        return tuple((each.recomputed, -(-each.recomputed // self.chunk), each.on_host) for each in self.divisions)

    @property
    def ways(self) -> tuple[bool, bool]:
        """Whether any tokens are recomputed, and whether the host attends to any."""
        division = self.division
        return division.recomputed > 0, division.on_host > 0

    def differs(self, other: Plan) -> bool:
        """Whether it treats tokens otherwise than another plan.

        With the freedom to do what does not pay, a plan is no other plan: it divides tokens in the same ways, only by
        costs that other steps showed. Recomputing in chunks is another way than recomputing all at once.
        """
        in_chunks = self.ways[0] and (self.name == "kvpr") != (other.name == "kvpr")
        return self.shape != other.shape and (self.ways != other.ways or in_chunks)


def spread(total: int, limits: Sequence[int]) -> list[int]:
    """A split point for each sequence, as equal as their limits allow, with a given sum.

    Parameters
    ----------
    total : int
        Tokens of all sequences together, at most the sum of the limits.
    limits : sequence of int
        Tokens that each sequence can give.
    """
    assert 0 <= total <= sum(limits)
    shares = [0] * len(limits)
    left = total
    order = sorted(range(len(limits)), key=lambda index: limits[index])
    for place, index in enumerate(order):
        shares[index] = min(limits[index], -(-left // (len(order) - place)))
        left -= shares[index]
    return shares
