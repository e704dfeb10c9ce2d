"""What every test shares: the `--full` option, the markers, one thread per process, random numbers that come back."""

import gc
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
POOLS = {"launchers": 2, "benchmarks": 1, "links": 1, "ends": 1, "losses": 1, "hosts": 1}
"""Pools that files share, and how many tests of each are drawn in all: what real launchers do beside `forked`, tiny
runs of benchmarks, which share a harness, benchmarks over emulated links, commands that are ended in the midst, ways to
lose a rank of a server, and jobs over two hosts."""
# Files that take longest, of ten seconds and more. They begin first: a long one at the end would be waited for alone.
LONG_FILES = (
    "distributed/test_serve.py",
    "distributed/test_random_engines.py",
    "distributed/test_fairkv_command.py",
    "distributed/test_runahead.py",
    "distributed/test_fairkv.py",
    "hosts/test_noise.py",
    "distributed/test_run_command.py",
    "hosts/test_hosts_benchmark.py",
    "unit/benchmarks/test_offload.py",
    "hosts/test_main_job.py",
    "unit/benchmarks/test_prefill.py",
    "distributed/test_chat.py",
    "distributed/test_registry.py",
    "unit/test_sources.py",
    "distributed/test_job.py",
    "unit/runahead/test_search.py",
    "distributed/test_partition_search.py",
    "distributed/test_joint_passes.py",
    "distributed/test_exactness.py",
    "distributed/test_sessions.py",
    "distributed/test_choice.py",
    "unit/benchmarks/test_rivals.py",
    "distributed/test_kill.py",
    "distributed/test_passkey.py",
    "unit/offload/test_combinations.py",
    "unit/benchmarks/test_limits.py",
    "unit/benchmarks/test_fairkv.py",
    "unit/fairkv/test_shared_heads.py",
    "unit/benchmarks/test_runahead.py",
    "unit/attention/test_compiled.py",
    "unit/offload/test_quantization.py",
    "unit/offload/test_exactness.py",
    "distributed/test_recipe.py",
    "distributed/test_large_bodies.py",
    "distributed/test_serve_page.py",
    "distributed/test_starts.py",
    "unit/tracking/test_monitor.py",
    "distributed/test_launch.py",
    "unit/offload/test_windows.py",
    "distributed/test_lost_peer.py",
    "unit/weights/test_tensor_parallel.py",
    "distributed/test_bad_input.py",
    "unit/benchmarks/test_scaling.py",
    "unit/offload/test_columns.py",
    "distributed/test_placement.py",
    "unit/attention/test_prefill_plan.py",
    "distributed/test_properties.py",
    "unit/recipes/test_recipes.py",
    "unit/fairkv/test_memory.py",
    "distributed/test_shared_memory.py",
    "unit/benchmarks/test_decode.py",
    "unit/engine/test_session_files.py",
    "distributed/test_offload.py",
)


def new_seed() -> int:
    """The variable's, or another each time."""
    return int(os.environ.get(SEED) or random.SystemRandom().randrange(1 << 32))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked full: the whole matrix")
    parser.addoption("--cases", type=int, help="how many cases a test draws at random, in place of its own number")
    parser.addoption("--draw", type=int, help="seed by which it is drawn which parameters of tests run")


def pytest_report_header(config: pytest.Config) -> str:
    return f"parameters drawn with --draw {config.getoption('--draw')}"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Processes of xdist draw the same."""
    node.workerinput["draw"] = node.config.getoption("--draw")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--draw") is None:
        config.option.draw = vars(config).get("workerinput", {"draw": new_seed()})["draw"]
    config.addinivalue_line("markers", "full: part of the whole matrix, run with --full only")
    config.addinivalue_line("markers", "drawn(count, pool): of a test's parameters, or a file's pool, so many run")
    config.addinivalue_line("markers", "drawn(pool): of a pool of POOLS, over all files")
    config.addinivalue_line("markers", "distributed: starts ranks of its own (set on all of tests/distributed)")
    torch.set_num_threads(1)
    # Thousands of tests are collected, in every process, and next to nothing of it is garbage.
    gc.disable()
    # What runs out of time says where it stands.
    os.environ["PYTHONFAULTHANDLER"] = "1"
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
    if not config.getoption("--full"):
        draw(items, config.getoption("--draw"))


def pytest_collection_finish() -> None:
    # What was imported stays: the collector need not walk it again and again.
    gc.freeze()
    gc.enable()


def draw(items: list[pytest.Item], seed: int) -> None:
    """Skip what is not drawn of each test's parameters that are marked `drawn`, or of a file's pool, or one of `POOLS`.

    What is asked for by its name alone runs. Tests of a file that have as many parameters draw the same.
    """
    pools: dict[tuple[Any, ...], list[pytest.Item]] = {}
    for item in items:
        marker = item.get_closest_marker("drawn")
        if marker is not None and not item.get_closest_marker("full"):
            count, *pool = marker.args
            file, test = item.nodeid.partition("::")[0], "" if pool else item.nodeid.partition("[")[0]
            if count in POOLS:
                file, test, pool, count = "", "", [count], POOLS[count]
            pools.setdefault((file, *pool, test, count), []).append(item)
    for (*pool, _, count), found in pools.items():
        chosen = random.Random(f"{seed} {pool}").sample(found, min(count, len(found)))
        for item in found:
            if item not in chosen:
                item.add_marker(pytest.mark.skip(reason="not drawn"))


@pytest.fixture(scope="module")
def running(request: pytest.FixtureRequest) -> Callable[[str], list[Any]]:
    """A function that gives a parameter's values of all of this file's tests that run: what one launch answers."""

    def values(parameter: str) -> list[Any]:
        here = [item for item in request.session.items if item.path == request.path]
        found = [vars(item).get("callspec") for item in here if not item.get_closest_marker("skip")]
        return [call.params[parameter] for call in found if call is not None and parameter in call.params]

    return values


@pytest.fixture(autouse=True)
def fresh_numbers() -> int:
    """Other random numbers in every run; a test that fails shows the variable that brings its own back.

    Generators of a test's own must be seeded from these.
    """
    seed = new_seed()
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
