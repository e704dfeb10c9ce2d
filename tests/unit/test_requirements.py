"""What the library imports is what setup.cfg requires."""

import ast
import configparser
import re
import sys
from pathlib import Path

from megakv.base.errors import EXTRAS

ROOT = Path(__file__).resolve().parents[2]
PART_OF = {"pydantic_core": "pydantic", "PIL": "matplotlib", "triton": "torch"}
"""Packages that others bring along as a part of themselves."""


def imported() -> set[str]:
    """Top-level names of the third-party packages that megakv/ and launcher/ import, wherever in a file they do."""
    found: set[str] = set()
    for path in (path for folder in ("megakv", "launcher") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add((node.module or "").split(".")[0])
    return {PART_OF.get(name, name) for name in found - {"megakv"} - sys.stdlib_module_names}


def required() -> set[str]:
    """Names of what an installation with all extras brings, as they are imported."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = config["options.extras_require"]
    groups = [config["options"]["install_requires"], *(extras[name] for name in EXTRAS)]
    entries = [entry for group in groups for entry in group.split()]
    return {re.split(r"[<>=!~\[;]", entry)[0].lower().replace("-", "_") for entry in entries}


def test_the_library_imports_what_it_requires_and_nothing_else() -> None:
    assert imported() == required()
