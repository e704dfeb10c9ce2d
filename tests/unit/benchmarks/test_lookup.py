"""benchmarks/lookup.py: the command that its documentation names is one that it takes."""

from benchmarks.lookup import parse_arguments


def test_defaults_are_allowed() -> None:
    assert list(parse_arguments([]).places) == ["memory", "link", "link_auto"]
