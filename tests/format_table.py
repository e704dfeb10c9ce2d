"""What comes of each weight format on each mesh: ``python -m tests.format_table`` writes docs/formats.json anew.

Tiny models of two families each, in folders as they are published; tokens are compared with transformers' own run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.distributed.launch import run_ranks
from tests.quantised_folders import MAKERS, families_of, reference

SCRIPT = Path(__file__).parent / "distributed" / "ranks" / "quantised_folders.py"
RESULTS = Path(__file__).resolve().parents[1] / "docs" / "formats.json"
MESHES = ("1x1", "2x1", "1x2", "2x2")
"""Context-parallel ranks by tensor-parallel ones."""

Outcomes = dict[str, dict[str, dict[str, str]]]
"""By format, family and mesh."""


def outcomes(kinds: Iterable[tuple[str, str]], meshes: Iterable[str], work: Path) -> Outcomes:
    """What comes of some formats and families on some meshes."""
    places, expected = {}, {}
    for kind, family in kinds:
        folder = work / f"{kind} {family}".replace(" ", "_")
        MAKERS[kind](family, folder)
        places[str(folder)] = (kind, family)
        expected[str(folder)] = reference(kind, family, folder)
    (work / "cases.json").write_text(json.dumps(expected))
    found: Outcomes = {}
    for mesh in meshes:
        ranks = int(mesh[0]) * int(mesh[2])
        run_ranks(SCRIPT, work / "cases.json", work / "out.json", mesh, ranks=ranks, timeout=600).check()
        for folder, outcome in json.loads((work / "out.json").read_text()).items():
            kind, family = places[folder]
            found.setdefault(kind, {}).setdefault(family, {})[mesh] = outcome.replace(folder, "FOLDER")
    return found


def everything() -> list[tuple[str, str]]:
    """All formats, with the families that they are published for."""
    return [(kind, family) for kind in MAKERS for family in families_of(kind)]


if __name__ == "__main__":
    with TemporaryDirectory() as work:
        RESULTS.write_text(json.dumps(outcomes(everything(), MESHES, Path(work)), indent=1) + "\n")
