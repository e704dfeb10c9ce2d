"""The mesh is asked where it is used: nobody keeps its sizes and ranks, which are others when it is made anew."""

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.unit.test_imports import modules

SIZES = {"rank", "world_size", "cp_size", "cp_rank", "tp_size", "tp_rank", "cp_ranks", "tp_ranks"}


def of_mesh(value: ast.AST) -> bool:
    """Whether an expression is one of a mesh's sizes and ranks, or the mesh that a communicator has."""
    if not isinstance(value, ast.Attribute):
        return False
    owner = value.value
    name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
    return (value.attr in SIZES and name.lstrip("_") == "mesh") or (value.attr == "mesh" and name != "self")


def kept(path: Path) -> Iterator[int]:
    """Lines in which an object keeps some."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Assign):
            targets, values = (getattr(side, "elts", [side]) for side in (node.targets[0], node.value))
            if any(
                isinstance(target, ast.Attribute) and of_mesh(value)
                for target, value in zip(targets, values, strict=False)
            ):
                yield node.lineno


def test_nobody_keeps_sizes_of_the_mesh(tmp_path: Path) -> None:
    assert [f"{name}:{line}" for name, path in modules().items() for line in kept(path)] == []
    example = tmp_path / "example.py"
    example.write_text("class A:\n    def f(self, comm):\n        self.a, self.b = comm.x, comm.mesh.cp_size\n")
    assert [*kept(example)] == [3]
