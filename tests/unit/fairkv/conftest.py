"""Budgets that come back with the seed of a test."""

import numpy as np
import pytest

from tests.unit.fairkv.instances import RANDOM


@pytest.fixture(autouse=True)
def fresh_budgets(fresh_numbers: int) -> None:
    RANDOM.bit_generator.state = np.random.default_rng(fresh_numbers).bit_generator.state
