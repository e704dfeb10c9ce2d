"""benchmarks/lookup.py: the command that its documentation names is one that it takes."""

import sys

from tests.unit.benchmarks.running import BENCHMARKS

sys.path.append(str(BENCHMARKS))
from lookup import parse_arguments  # noqa: E402


def test_defaults_are_allowed() -> None:
    assert list(parse_arguments([]).places) == ["memory", "link", "link_auto"]
