import random

import pytest

from megakv.tracking.report import RunReport
from tests.unit.tracking.reports import random_report


@pytest.fixture
def random_source() -> random.Random:
    return random.Random(random.getrandbits(32))


@pytest.fixture
def report(random_source: random.Random) -> RunReport:
    return random_report(random_source)
