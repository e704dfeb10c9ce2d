"""benchmarks/formats.py: the command that its documentation names is one that it takes."""

from benchmarks.formats import parse_arguments


def test_defaults_are_allowed() -> None:
    asked = parse_arguments(["--quick"])
    assert list(asked.kinds) == ["Q4_1", "Q8_0", "Q4_K"] and list(asked.lengths) == [128, 512]
