"""Everything here needs hosts of its own; where they cannot be made, the reason is the tests' result."""

import os
from pathlib import Path

import pytest

from tests.hosts.tools import unavailable

REASON = unavailable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    for item in items:
        if REASON is not None and folder in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture
def slots() -> int:
    """Ranks on each of two hosts: tensor parallelism inside each where there are cores for it."""
    return 2 if len(os.sched_getaffinity(0)) >= 4 else 1
