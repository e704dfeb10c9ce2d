"""Which files of the package need which: no file needs itself through others, and a method needs few."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STORES = {"KVStore", "DenseStore", "RaggedStore", "SharedHeadsStore", "TieredStore"}


def modules() -> dict[str, Path]:
    """Files by the name that others import them by; `launcher/` is installed as `megakv.launcher`."""
    found = {}
    for folder, package in (("megakv", "megakv"), ("launcher", "megakv.launcher")):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


def imported(path: Path) -> Iterator[str]:
    """What a file imports anywhere, for its types alone too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield node.module


@pytest.fixture(scope="module")
def needs() -> dict[str, set[str]]:
    files = modules()
    # A package's own file only names what lies in it.
    packages = {name for name, path in files.items() if path.name == "__init__.py" and name != "megakv"}
    found = {}
    for name, path in files.items():
        direct = {other for other in imported(path) if other in files and other != name}
        found[name] = {
            other for other in direct if not (other in packages and any(o.startswith(other + ".") for o in direct))
        }
    return found


def reach(needs: dict[str, set[str]], name: str) -> set[str]:
    found: set[str] = set()
    ahead = [name]
    while ahead:
        fresh = needs[ahead.pop()] - found
        found |= fresh
        ahead += fresh
    return found - {name}


def test_no_file_needs_itself_through_others(needs: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize(("name", "most"), [("megakv.attention.pass_kv", 17), ("megakv.offload.kvpr", 8)])
def test_a_method_needs_few_files(needs: dict[str, set[str]], name: str, most: int) -> None:
    assert len(reach(needs, name)) <= most, sorted(reach(needs, name))


def test_nobody_asks_what_kind_a_store_is() -> None:
    """A store's verbs are all that others know of it, so that stores compose."""
    asking = []
    for path in [*modules().values(), *(ROOT / "benchmarks").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "isinstance":
                named = {each.id for each in ast.walk(node.args[1]) if isinstance(each, ast.Name)}
                if named & STORES:
                    asking.append(f"{path}:{node.lineno}")
    assert not asking
