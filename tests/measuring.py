"""Measurements on a machine that may be busy with other things."""

import sys
from collections.abc import Callable
from typing import Any

ATTEMPTS = 4


def count_calls(work: Callable[[], Any]) -> int:
    """How many functions are called meanwhile, built-in ones too: what work costs, on any machine."""
    count = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def until_it_holds(check: Callable[[], None]) -> None:
    """Measure and check anew where a check fails, some times at most.

    A busy machine makes now this slow and now that; what is wrong shows every time.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return check()
        except AssertionError:
            pass
    check()
