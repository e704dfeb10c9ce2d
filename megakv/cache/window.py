"""What stays of a layer's keys and values when its sliding window has moved on."""

from __future__ import annotations

MARGIN_DIVISOR = 64
"""Beside a window this fraction of it stays, at most twice: a conversation may be cut back by so much without being
read anew, and not every token is a reason to look for what can go."""


def held_rows(window: int | None, tokens: int) -> int:
    """Of so many tokens of a sequence, how many a layer holds at most between passes."""
    return tokens if window is None else min(tokens, window + 2 * (window // MARGIN_DIVISOR))


def first_held(window: int | None, length: int, gone: int) -> int:
    """The slot before which everything can go, given those that are cached and those that went before."""
    if window is None:
        return gone
    margin, seen = window // MARGIN_DIVISOR, length - window + 1
    return seen - margin if seen > gone + 2 * margin else gone
