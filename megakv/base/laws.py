"""Settings that are right each for itself and cannot be had together: such a refusal carries the law behind it."""

from __future__ import annotations

from typing import Literal

Law = Literal["needs", "one", "foreign", "whole", "room", "inputs", "machine"]

LAWS: dict[Law, str] = {
    "needs": "a setting of something has no effect without it, and what is decided by a file's numbers needs the file",
    "one": "of two settings that decide the same thing only one can be obeyed",
    "foreign": "what was measured or made for one machine, mesh, model or method says nothing about another",
    "whole": "ranks and heads are not cut: there are as many parts as share them, and they add up to the whole",
    "room": "what must be kept in any case must have room: a window, a page of every layer, the weights",
    "inputs": "keys and values can be recomputed only on a rank that has all that they were computed from",
    "machine": "a machine has the memory, cores, links and types of numbers that it has",
}
"""Why settings exclude each other. What is refused for another reason is a feature that is missing."""


class CombinationError(ValueError):
    """Settings, right each for itself, that a law excludes together; the message names them and what would work."""

    def __init__(self, law: Law, message: str):
        super().__init__(message)
        self.law: Law = law


def repeated(message: str, *causes: object) -> ValueError:
    """What causes say, in another message: by the law of the first of them that has one."""
    law = next((cause.law for cause in causes if isinstance(cause, CombinationError)), None)
    return ValueError(message) if law is None else CombinationError(law, message)
