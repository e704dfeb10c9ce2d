"""Measurements on a machine that may be busy with other things."""

from collections.abc import Callable

ATTEMPTS = 4


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
