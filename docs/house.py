"""Draws the rooms as they import each other: ``python docs/house.py [FILE]`` (default docs/images/house.png)."""

from __future__ import annotations

import ast
import json
import sys
from collections import Counter
from pathlib import Path
from textwrap import wrap

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

ROOT = Path(__file__).resolve().parents[1]
ROOMS: list[str] = [room for room, _ in json.loads((ROOT / "tests" / "rooms.json").read_text())]
INK, FAINT, BOX, ARROW = "#22282f", "#7a838c", "#dce8f5", "#2f6db3"


def folder(room: str) -> Path:
    """Where the files of a room lie."""
    return ROOT / room if room == "launcher" else ROOT / "megakv" / room


def purpose(room: str) -> str:
    """The first line of what the room says of itself."""
    text = ast.get_docstring(ast.parse((folder(room) / "__init__.py").read_text())) or ""
    return text.splitlines()[0].rstrip(".") if text else ""


def imports() -> Counter[tuple[str, str]]:
    """By pairs of rooms, the files of the first that import the second."""
    found: Counter[tuple[str, str]] = Counter()
    for room in ROOMS:
        for path in folder(room).rglob("*.py"):
            modules = {
                node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)
            }
            others = {module.split(".")[1] for module in modules if module and module.startswith("megakv.")}
            found.update((room, other) for other in others & set(ROOMS) - {room})
    return found


def draw() -> Figure:
    """One row a room from the top down; an arrow for each pair, as thick as there are files that import."""
    figure = Figure(figsize=(11, 0.56 * len(ROOMS) + 0.4), dpi=120, facecolor="white")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, 110), ylim=(len(ROOMS) + 0.4, -0.4))
    axes.axis("off")
    for floor, room in enumerate(ROOMS):
        lines = sum(path.read_text().count("\n") for path in folder(room).rglob("*.py"))
        axes.add_patch(FancyBboxPatch((1, floor + 0.1), 70, 0.7, boxstyle="round,pad=0.05", fc=BOX, ec="none"))
        axes.text(2.5, floor + 0.45, room, fontsize=11, weight="bold", color=INK, va="center")
        axes.text(18, floor + 0.45, f"{lines:,}", fontsize=8.2, color=FAINT, va="center", ha="right")
        words = "\n".join(wrap(purpose(room).replace("`", ""), 84))
        axes.text(20, floor + 0.45, words, fontsize=7.8, color=INK, va="center", linespacing=1.1)
    for (room, other), files in sorted(imports().items(), key=lambda each: -each[1]):
        upper, lower = ROOMS.index(room), ROOMS.index(other)
        bend = 0.16 + 0.3 * (lower - upper) / len(ROOMS)
        arrow = FancyArrowPatch(
            (72, upper + 0.5), (72, lower + 0.4), connectionstyle=f"arc3,rad=-{bend}", arrowstyle="-|>",
            mutation_scale=7, lw=0.3 + files / 12, color=ARROW, alpha=0.35,
        )  # fmt: skip
        axes.add_patch(arrow)
    says = "lines of Python in each room; arrows: which room's files import which, thicker where more do"
    axes.text(1, len(ROOMS) + 0.1, says, fontsize=7.8, color=FAINT, va="center")
    return figure


if __name__ == "__main__":
    drawn = draw()
    FigureCanvasAgg(drawn)
    drawn.savefig(sys.argv[1] if len(sys.argv) > 1 else ROOT / "docs" / "images" / "house.png")
