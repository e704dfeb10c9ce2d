import random

import pytest

from megakv.tracking import RunReport
from tests.unit.tracking.reports import random_report


@pytest.fixture
def random_source() -> random.Random:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")  # shown by pytest when the test fails
    return random.Random(seed)


@pytest.fixture
def report(random_source: random.Random) -> RunReport:
    return random_report(random_source)
