"""The fitted empirical rule (context parallelism, Appendix D): ``h = alpha log T + beta log(T / (T + P)) + gamma``.

Pass-KV is preferred where h is positive. The published constants (-1.059, 1.145, 12.112) belong to one machine and, as
printed, prefer pass-Q for a full prefill of 128K tokens, against the same paper's text: none are shipped. ``megakv
fit-policy`` measures and fits them on the machine that will use them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from megakv.costmodel.curves import Positive
from megakv.costmodel.hardware import Fingerprint
from megakv.costmodel.records import Record, load_record


class FitPoint(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    new: int = Field(ge=1)  # T and P of one sequence.
    cached: int = Field(ge=0)
    pass_kv_s: Positive  # Seconds of one attention layer.
    pass_q_s: Positive

    @property
    def advantage(self) -> float:
        """How much longer the slower method takes, relative to the faster; positive where pass-KV is the faster."""
        return (self.pass_q_s - self.pass_kv_s) / min(self.pass_q_s, self.pass_kv_s)


class PolicyFit(Record):
    """Constants of the rule with the points they were fitted to."""

    format: Literal["megakv policy fit"] = "megakv policy fit"
    version: Literal[1] = 1
    alpha: float = Field(allow_inf_nan=False)
    beta: float = Field(allow_inf_nan=False)
    gamma: float = Field(allow_inf_nan=False)
    fingerprint: Fingerprint  # Where the points were measured.
    ring_size: int = Field(ge=2)  # Context-parallel degree, and the layer of one rank.
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    # Share of the points on which the rule picks the faster method: of all, and of those that differ by over 2%.
    accuracy: float = Field(ge=0, le=1)
    clear_accuracy: float = Field(ge=0, le=1)
    points: tuple[FitPoint, ...] = Field(min_length=1)

    def h(self, new: int, cached: int) -> float:
        """Positive where pass-KV is preferred."""
        return empirical_rule((self.alpha, self.beta, self.gamma), new, cached)


def empirical_rule(constants: Sequence[float], new: int, cached: int) -> float:
    """``h`` of Appendix D, with natural logarithms."""
    alpha, beta, gamma = constants
    return alpha * math.log(new) + beta * math.log(new / (new + cached)) + gamma


def load_fit(path: str, *, setting: str = "fit") -> PolicyFit:
    return load_record(PolicyFit, path, setting=setting, remedy="write a new one with megakv fit-policy --json FILE")
