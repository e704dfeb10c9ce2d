"""Files that the documentation names are there, where it says."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PATH = re.compile(r"(?<![\w./<-])((?:[\w.-]+/)+(?:[\w.-]+\.(?:py|cpp|h|sh)\b|(?=`)))")
NAME = re.compile(r"`([\w.-]+\.(?:py|cpp|h|sh))`")


def stray(text: str, page: Path) -> set[str]:
    """Files and folders that lie neither below the page, nor the repository's root, nor the package.

    A file that is named alone lies in a folder that the page names.
    """
    homes = (page.parent, ROOT, ROOT / "megakv")
    found = {name: [home / name for home in homes if (home / name).exists()] for name in PATH.findall(text)}
    folders = [ROOT] + [each if each.is_dir() else each.parent for places in found.values() for each in places]
    alone = {name for name in NAME.findall(text) if not any((folder / name).exists() for folder in folders)}
    return alone | {name for name, places in found.items() if not places}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_are_there(page: Path) -> None:
    assert stray(page.read_text(), page) == set()


def test_files_that_have_moved_are_found() -> None:
    text = "`engine/build.py` and `old/build.py`; `config.py` beside it, `mesh.py` and `placement/`, not `weights/`"
    assert stray(text, ROOT / "README.md") == {"old/build.py", "mesh.py", "placement/"}
