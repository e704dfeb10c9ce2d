"""A turn: the tokens of a prompt that are compressed together, whichever passes read them."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from megakv.fairkv.observation import Queries


@dataclass
class Observation:
    """What a layer has seen of a turn that goes on, on one rank.

    Attributes
    ----------
    queries : Queries, optional
        The last ones, which may yet belong to the window at the turn's end; None where there is no window.
    masses : dict
        By sequence, ``[K, n]`` what all queries so far have given to this rank's tokens of the turn.
    """

    queries: Queries | None = None
    masses: dict[int, Tensor] = field(default_factory=dict)


@dataclass
class Turn:
    """Slots that are read in one pass or, as chunks of a prompt, in several.

    Parameters
    ----------
    first, stop : int
        Its first slot, and the one behind its last.

    Attributes
    ----------
    seen : dict
        By layer, what its tokens were observed to look at.
    """

    first: int
    stop: int
    seen: dict[int, Observation] = field(default_factory=dict)
