"""What every test shares: the `--full` option, the markers, one thread per process, random numbers that come back."""

import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

SEED = "MEGAKV_TEST_SEED"
# Files that take longest, of ten seconds and more. They begin first: a long one at the end would be waited for alone.
LONG_FILES = (
    "distributed/test_exactness.py",
    "distributed/test_random_engines.py",
    "unit/injection/test_support.py",
    "distributed/test_kill.py",
    "distributed/test_fairkv.py",
    "distributed/test_runahead.py",
    "hosts/test_main_job.py",
    "unit/recipes/test_recipes.py",
    "unit/offload/test_exactness.py",
    "hosts/test_hosts.py",
    "distributed/test_lost_peer.py",
    "hosts/test_noise.py",
    "distributed/test_partition_search.py",
    "unit/benchmarks/test_prefill.py",
    "distributed/test_properties.py",
    "distributed/test_job.py",
    "unit/benchmarks/test_offload.py",
    "unit/runahead/test_search.py",
    "distributed/test_launch.py",
    "distributed/test_passkey.py",
    "unit/benchmarks/test_runahead.py",
    "hosts/test_hosts_benchmark.py",
    "distributed/test_offload.py",
    "unit/tracking/test_monitor.py",
    "distributed/test_bad_input.py",
    "distributed/test_recipe.py",
    "distributed/test_sessions.py",
    "unit/costmodel/test_chain.py",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked full: the whole matrix")
    parser.addoption("--cases", type=int, help="how many cases a test draws at random, in place of its own number")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: part of the whole matrix, run with --full only")
    config.addinivalue_line("markers", "distributed: starts ranks of its own (set on all of tests/distributed)")
    torch.set_num_threads(1)
    # A script's background jobs ignore Ctrl-C, and so does all that they start; tests send it to what they start.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    folder = Path(__file__).parent
    place = {folder / name: index for index, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: place.get(item.path, len(place)))
    for item in items:
        if "distributed" in item.path.parts:
            item.add_marker(pytest.mark.distributed)
        if item.get_closest_marker("full") and not config.getoption("--full"):
            item.add_marker(pytest.mark.skip(reason="needs --full"))


@pytest.fixture(autouse=True)
def fresh_numbers() -> int:
    """Other random numbers in every run; a test that fails shows the variable that brings its own back.

    Generators of a test's own must be seeded from these.
    """
    seed = int(os.environ.get(SEED) or random.SystemRandom().randrange(1 << 32))
    print(f"{SEED}={seed}")
    random.seed(seed)
    np.random.seed(seed)
    # Torch's are the same in every run, whichever tests came before in this process.
    torch.manual_seed(0)
    return seed


@pytest.fixture
def write_json(tmp_path: Path) -> Callable[[str, Any], Path]:
    """A function that writes a value as JSON under the test's own folder and returns the path."""

    def write(name: str, value: Any) -> Path:
        path = tmp_path / name
        path.write_text(json.dumps(value))
        return path

    return write
