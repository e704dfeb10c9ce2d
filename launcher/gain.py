"""What a mapping of heads is worth: what its profile promises, what was measured, and whether to run it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from megakv.fairkv.mapping import LEAST_GAIN, HeadMapping

LEAST_MEASURED = 0.01
"""A smaller one that was measured may be chance."""


@dataclass(frozen=True)
class Gain:
    """How many times as fast decoding is with a mapping as with heads in runs of neighbours."""

    # Of attention alone, if it takes time in proportion to the tokens of every layer's slowest rank.
    predicted: float
    copies: int
    # Of whole steps, by the cost model; None where no machine was named.
    step: float | None = None
    # Of whole steps; None where nothing was measured.
    measured: float | None = None
    # Threads of the ranks on a host and its cores, where there are too few of them for times to mean anything.
    shared_cores: tuple[int, int] | None = None

    @classmethod
    def predict(cls, mapping: HeadMapping) -> Self:
        assert mapping.contiguous is not None
        before, after = (sum(map(max, balance.loads)) for balance in (mapping.contiguous, mapping))
        step = None if mapping.time is None else mapping.time.gain
        return cls(before / after if after > 0 else 1.0, mapping.copies, step)

    def measure(self, measured: float, shared_cores: tuple[int, int] | None) -> Self:
        return replace(self, measured=measured, shared_cores=shared_cores)

    @property
    def declined(self) -> bool:
        """Whether the mapping promises nothing, and need not be measured."""
        return (self.predicted if self.step is None else self.step) <= 1 + LEAST_GAIN

    @property
    def taken(self) -> bool:
        """Whether to run the mapping: where it was measured to be faster, or cannot be and is predicted to be."""
        if self.declined or self.measured is None:
            return False
        return self.measured > 1 + LEAST_MEASURED if self.shared_cores is None else self.step is not None

    def sentence(self) -> str:
        """The result in one line."""
        if self.declined:
            most = f"up to {self.copies} copies in a layer" if self.copies else "no copies (--copies allows some)"
            why = "loads the ranks more evenly" if self.step is None else "is predicted to have faster steps"
            return f"leave the heads alone: with {most} no mapping {why} than heads in runs"
        predicted = f"predicted {self.predicted:.2f} times as fast in attention, by the tokens of the slowest ranks"
        if self.step is not None:
            predicted = f"predicted {self.step:.2f} times as fast in a whole step, by the cost model"
        if self.measured is None:
            return predicted
        measured = f"measured {self.measured:.2f} times as fast in a whole step"
        if self.shared_cores is not None:
            threads, cores = self.shared_cores
            unknown = "" if self.taken else "not known here (--hardware predicts steps): "
            return (
                f"{unknown}{predicted}; {measured}, which means nothing where {threads} threads of ranks share "
                f"{cores} cores"
            )
        return f"{measured}; {predicted}" if self.taken else f"leave the heads alone: {measured}; {predicted}"

    def values(self) -> dict[str, Any]:
        """For the result's JSON."""
        shared = self.shared_cores
        return {
            "result": self.sentence(),
            "taken": self.taken,
            "declined": self.declined,
            "predicted_gain": {"attention_tokens": self.predicted, "step": self.step},
            "measured_gain": self.measured,
            "shared_cores": None if shared is None else {"threads": shared[0], "cores": shared[1]},
        }
