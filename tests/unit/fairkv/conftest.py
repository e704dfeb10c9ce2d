"""Budgets that come back with the seed of a test."""

import numpy as np
import pytest

from tests.unit.fairkv.instances import RANDOM


@pytest.fixture(autouse=True)
def fresh_budgets(fresh_numbers: int) -> None:
    RANDOM.bit_generator.state = np.random.default_rng(fresh_numbers).bit_generator.state


@pytest.fixture
def same_budgets(fresh_budgets: None) -> None:
    """The same in every run, for what holds in the mean and not of whatever is drawn."""
    RANDOM.bit_generator.state = np.random.default_rng(0).bit_generator.state
