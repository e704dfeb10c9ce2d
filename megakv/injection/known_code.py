"""What functions run, as code that can be compared: theirs, and that of the files of the installed transformers."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from pathlib import Path
from typing import Any

import transformers

OWN_FILES = Path(transformers.__file__).parent


class _Bare(ast.NodeTransformer):
    """Code without what does not run: annotations, decorators, names and documentation of functions."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.name, node.decorator_list, node.returns = "", [], None
        if ast.get_docstring(node) is not None:
            node.body = node.body[1:]
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        return node if node.value is None else ast.Assign([node.target], node.value)


def bare(node: ast.AST) -> str:
    return ast.dump(_Bare().visit(node))


@functools.lru_cache(maxsize=256)
def code_of(function: Any) -> str:
    """What a function does, whatever it is called; empty if nobody knows, or somebody has put another around it."""
    while hasattr(function, "__wrapped__"):
        # transformers' own, for training and for outputs, call what is inside.
        if not Path(function.__code__.co_filename).is_relative_to(OWN_FILES):
            return ""
        function = function.__wrapped__
    if getattr(function, "__closure__", None):
        return ""
    try:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except Exception:
        # Not a function of a file, or one that cannot be read by itself.
        return ""
    return bare(node)


def parsed(kind: str) -> list[ast.stmt]:
    """The file of one model type; nothing where there is none."""
    name = kind.lower()
    file = OWN_FILES / "models" / name / f"modeling_{name}.py"
    return ast.parse(file.read_text(encoding="utf-8")).body if file.exists() else []


def forwards_of(top: list[ast.stmt], names: list[str]) -> list[ast.stmt | None]:
    """The forward of each of some classes of a file."""
    classes = {node.name: node for node in top if isinstance(node, ast.ClassDef)}
    bodies = (classes[name].body if name in classes else [] for name in names)
    return [next((node for node in body if getattr(node, "name", "") == "forward"), None) for body in bodies]
