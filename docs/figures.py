"""Draws the pictures of docs/methods.md: ``python docs/figures.py [FOLDER]`` (default docs/images)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

RANKS = 4
COLORS = ("#2f6db3", "#2a9187", "#d97f1f", "#8a5aa8")
PALE = ("#dce8f5", "#d8eeeb", "#fae6d0", "#ebe0f2")
INK, FAINT, LINE = "#22282f", "#7a838c", "#c9ced4"
INCH = 1.15
"""Inches per unit of a drawing's coordinates; a rank's column is two units wide."""


class Canvas:
    """A drawing in units of which a rank's column takes two; y grows downwards.

    Parameters
    ----------
    width, height : float
        In units.
    """

    def __init__(self, width: float, height: float):
        self.figure = Figure(figsize=(width * INCH, height * INCH), dpi=120, facecolor="white")
        self.axes: Axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, width), ylim=(height, 0))
        self.axes.axis("off")

    def text(self, x: float, y: float, text: str, *, size: float = 10, color: str = INK, side: str = "center") -> None:
        """Text centred in height, at its left, right or centre."""
        self.axes.text(x, y, text, fontsize=size, color=color, ha=side, va="center", linespacing=1.35)

    def block(self, x: float, y: float, label: str, rank: int, *, solid: bool, width: float = 1.1) -> None:
        """A rounded box around (x, y): solid for keys and values, pale for queries."""
        self.axes.add_patch(
            FancyBboxPatch(
                (x - width / 2 + 0.06, y - 0.17), width - 0.12, 0.34, boxstyle="round,pad=0.06",
                facecolor=COLORS[rank] if solid else PALE[rank], edgecolor=COLORS[rank], linewidth=1.5, zorder=3,
            )
        )  # fmt: skip
        self.axes.text(
            x, y + 0.01, label, fontsize=10, color="white" if solid else COLORS[rank], ha="center", va="center",
            weight="bold", zorder=4,
        )  # fmt: skip

    def arrow(
        self, start: tuple[float, float], end: tuple[float, float], color: str, *, bend: float = 0, style: str = "-|>"
    ) -> None:
        """An arrow from one point to another."""
        self.axes.add_patch(
            FancyArrowPatch(
                start, end, arrowstyle=style, mutation_scale=11, color=color, linewidth=1.4, shrinkA=0, shrinkB=0,
                connectionstyle=f"arc3,rad={bend}", zorder=2,
            )
        )  # fmt: skip

    def band(self, y: float, height: float, left: float, right: float, color: str = "#f4f6f8") -> None:
        """A pale background."""
        self.axes.add_patch(Rectangle((left, y), right - left, height, facecolor=color, edgecolor="none", zorder=0))

    def save(self, path: Path) -> None:
        """Write the drawing as PNG."""
        FigureCanvasAgg(self.figure).print_png(str(path), metadata={"Software": None})


def column(rank: int) -> float:
    """Centre of a rank's column."""
    return 3.0 + 2.0 * rank


EDGES = (column(0) - 1, column(RANKS - 1) + 1)


def heads(canvas: Canvas, y: float, stays: str, *, solid: bool) -> None:
    """The ranks' names, and below them what stays on each."""
    for rank in range(RANKS):
        canvas.text(column(rank), y, f"rank {rank}", size=11)
        canvas.block(column(rank), y + 0.55, f"{stays} {rank}", rank, solid=solid)
    canvas.text(1.8, y + 0.55, "stays", color=FAINT, side="right")


def ring(canvas: Canvas, y: float, travels: str, *, solid: bool) -> float:
    """The steps of a ring: what visits each rank, and the hops between steps. Returns the y below the last step."""
    for step in range(RANKS):
        row = y + 1.05 * step
        canvas.band(row - 0.32, 0.64, *EDGES)
        canvas.text(1.8, row, f"step {step}", color=FAINT, side="right")
        for rank in range(RANKS):
            owner = (rank - step) % RANKS
            canvas.block(column(rank), row, f"{travels} {owner}", owner, solid=solid)
            if step == RANKS - 1:
                continue
            below = row + 1.05 - 0.29
            if rank + 1 < RANKS:
                canvas.arrow((column(rank) + 0.3, row + 0.27), (column(rank + 1) - 0.3, below), COLORS[owner])
            else:
                # The last rank's neighbour is the first.
                canvas.arrow((column(rank) + 0.3, row + 0.27), (EDGES[1] - 0.05, row + 0.55), COLORS[owner])
                canvas.arrow((EDGES[0] + 0.05, row + 0.5), (column(0) - 0.3, below), COLORS[owner])
    return y + 1.05 * (RANKS - 1) + 0.32


def merged(canvas: Canvas, y: float, text: str) -> None:
    """The last line of a method: the outputs, and how they came about."""
    for rank in range(RANKS):
        canvas.block(column(rank), y, f"out {rank}", rank, solid=False)
    canvas.text(1.8, y, text, color=FAINT, side="right")


def draw_tokens() -> Canvas:
    """Which rank gets which token of a prompt, why, and where decoded tokens go."""
    canvas = Canvas(12.6, 5.5)
    chunks = 2 * RANKS
    owners = [*range(RANKS), *reversed(range(RANKS))]
    canvas.text(0.4, 0.35, "A prompt in 2N chunks; rank i takes chunks i and 2N-1-i", size=11, side="left")
    for chunk, owner in enumerate(owners):
        canvas.block(0.9 + 0.98 * chunk, 0.95, f"rank {owner}", owner, solid=True, width=0.94)
    canvas.text(8.9, 0.35, "then decoded tokens", size=11, side="left")
    for index in range(8):
        canvas.block(9.15 + 0.42 * index, 0.95, str(index % RANKS), index % RANKS, solid=True, width=0.38)
    size, left, top = 0.41, 0.46, 1.95
    canvas.text(left, 1.65, "queries (down) and the keys they see", color=FAINT, side="left")
    for row, owner in enumerate(owners):
        for key in range(chunks):
            corner = (left + size * key, top + size * row)
            color = COLORS[owner] if key <= row else "#f4f6f8"
            canvas.axes.add_patch(Rectangle(corner, size, size, facecolor=color, edgecolor="white", linewidth=1.2))
            if key == row:
                hidden = [corner, (corner[0] + size, corner[1]), (corner[0] + size, corner[1] + size)]
                canvas.axes.fill(*zip(*hidden, strict=True), color="#f4f6f8", zorder=2)
    bars(canvas, 5.0, "contiguous quarters", [1, 3, 5, 7], "the last rank has 7 times the work of the first")
    bars(canvas, 8.97, "2N chunks", [4, 4, 4, 4], "every rank has the same work")
    return canvas


def bars(canvas: Canvas, left: float, title: str, work: list[int], remark: str) -> None:
    """Work per rank as bars."""
    base = 4.85
    canvas.text(left, 1.65, title, size=11, side="left")
    for rank, amount in enumerate(work):
        corner = (left + 0.62 * rank, base - 0.36 * amount)
        canvas.axes.add_patch(Rectangle(corner, 0.5, 0.36 * amount, facecolor=COLORS[rank]))
        canvas.text(left + 0.62 * rank + 0.25, base + 0.18, str(rank), color=FAINT)
    canvas.text(left, base + 0.48, remark, size=9, color=FAINT, side="left")


def draw_pass_kv() -> Canvas:
    """Ring pass-KV."""
    canvas = Canvas(10.6, 6.75)
    heads(canvas, 0.35, "Q", solid=False)
    end = ring(canvas, 1.75, "KV", solid=True)
    for rank in range(RANKS):
        canvas.arrow((column(rank), end), (column(rank), end + 0.38), LINE)
    merged(canvas, end + 0.7, "merged by\nlog-sum-exp")
    canvas.text(column(0) - 0.9, 6.45, "a hop runs while the present part is attended to", color=FAINT, side="left")
    return canvas


def draw_pass_q() -> Canvas:
    """Ring pass-Q with the return of the partial results."""
    canvas = Canvas(10.6, 7.85)
    heads(canvas, 0.35, "KV", solid=True)
    end = ring(canvas, 1.75, "Q", solid=False)
    partial, home = end + 0.5, end + 1.85
    canvas.text(1.8, partial, "partial results\nof the queries of", color=FAINT, side="right")
    canvas.text(1.8, (partial + home) / 2, "All2All", side="right")
    for rank in range(RANKS):
        for step in range(RANKS):
            owner = (rank - step) % RANKS
            x = column(rank) + 0.42 * (owner - 1.5)
            canvas.block(x, partial, str(owner), owner, solid=False, width=0.38)
            canvas.arrow((x, partial + 0.24), (column(owner) + 0.2 * (rank - 1.5), home - 0.26), COLORS[owner])
    merged(canvas, home, "merged by\nlog-sum-exp")
    canvas.text(column(0) - 0.9, 7.55, "a partial result is an output and its log-sum-exp", color=FAINT, side="left")
    return canvas


SHARES = (2.5, 2.1, 1.8, 1.6)
"""Widths of the parts of a prompt in the chain, earlier ranks' first."""


def draw_runahead() -> Canvas:
    """The chain of KV-Runahead: uneven parts, and the prefix that goes down the ranks."""
    canvas = Canvas(10.6, 7.3)
    canvas.text(EDGES[0] + 0.05, 0.35, "A prompt in uneven parts: what comes later sees more", size=11, side="left")
    left = EDGES[0]
    for rank, width in enumerate(SHARES):
        canvas.block(left + width / 2, 0.9, f"Q, KV {rank}", rank, solid=True, width=width)
        left += width
    canvas.text(1.8, 0.9, "tokens", color=FAINT, side="right")
    top = 2.2
    for rank in range(RANKS):
        canvas.text(column(rank), 1.65, f"rank {rank}", size=11)
    for hop in range(RANKS):
        row = top + 1.05 * hop
        canvas.band(row - 0.32, 0.64, *EDGES)
        canvas.text(1.8, row, "its own" if hop == 0 else f"{hop} hop{'s' * (hop > 1)}", color=FAINT, side="right")
        for rank in range(hop, RANKS):
            owner = rank - hop
            canvas.block(column(rank), row, f"KV {owner}", owner, solid=True)
            if rank + 1 < RANKS:
                start, end = (column(rank) + 0.3, row + 0.27), (column(rank + 1) - 0.3, row + 1.05 - 0.29)
                canvas.arrow(start, end, COLORS[owner])
    end = top + 1.05 * (RANKS - 1) + 0.32
    for rank in range(RANKS):
        canvas.arrow((column(rank), top + 1.05 * rank + 0.32), (column(rank), end + 0.3), LINE)
    merged(canvas, end + 0.62, "merged by\nlog-sum-exp")
    remark = "each part is sent on the moment it is there, then attended to; no rank waits for a later one"
    canvas.text(column(0) - 0.9, 7.0, remark, color=FAINT, side="left")
    return canvas


def draw_all_gather() -> Canvas:
    """All-gather pass-KV."""
    canvas = Canvas(10.6, 4.4)
    heads(canvas, 0.35, "Q", solid=False)
    for rank in range(RANKS):
        canvas.block(column(rank), 1.7, f"KV {rank}", rank, solid=True)
        canvas.arrow((column(rank), 1.96), (column(rank), 2.22), LINE)
        canvas.arrow((column(rank), 2.62), (column(rank), 2.86), LINE)
        for owner in range(RANKS):
            canvas.block(column(rank) + 0.42 * (owner - 1.5), 3.12, str(owner), owner, solid=True, width=0.38)
        canvas.arrow((column(rank), 3.38), (column(rank), 3.62), LINE)
    canvas.band(2.24, 0.36, *EDGES, color="#e6eaee")
    canvas.text(column(1.5), 2.42, "one all-gather; every rank waits for it")
    canvas.text(1.8, 1.7, "own", color=FAINT, side="right")
    canvas.text(1.8, 3.12, "all keys and values", color=FAINT, side="right")
    merged(canvas, 3.9, "attention")
    return canvas


def draw_replicated() -> Canvas:
    """Replicated decoding."""
    canvas = Canvas(10.6, 5.1)
    for rank in range(RANKS):
        canvas.text(column(rank), 0.35, f"rank {rank}", size=11)
        box = FancyBboxPatch(
            (column(rank) - 0.49, 0.73), 0.98, 0.34, boxstyle="round,pad=0.06", facecolor="white", edgecolor=INK,
            linewidth=1.4,
        )  # fmt: skip
        canvas.axes.add_patch(box)
        canvas.text(column(rank), 0.91, "token, q")
        canvas.arrow((column(rank), 1.16), (column(rank), 1.5), LINE)
        canvas.block(column(rank), 1.78, f"KV {rank}", rank, solid=True)
        canvas.arrow((column(rank), 2.06), (column(rank), 2.4), LINE)
        canvas.block(column(rank), 2.68, "out, lse", rank, solid=False)
        canvas.arrow((column(rank), 2.96), (column(rank), 3.22), LINE)
        canvas.arrow((column(rank), 3.62), (column(rank), 3.92), LINE)
        canvas.text(column(rank), 4.17, "same out", size=10)
    canvas.band(3.24, 0.36, *EDGES, color="#e6eaee")
    canvas.text(column(1.5), 3.42, "one all-gather of outputs and log-sum-exps, merged on every rank")
    canvas.text(1.8, 0.91, "on every rank", color=FAINT, side="right")
    canvas.text(1.8, 1.78, "stays", color=FAINT, side="right")
    canvas.text(1.8, 2.68, "partial result", color=FAINT, side="right")
    remark = "the token's own key and value are kept by the rank that holds fewest tokens of the sequence"
    canvas.text(column(0) - 0.9, 4.75, remark, color=FAINT, side="left")
    return canvas


def draw_mesh() -> Canvas:
    """The CP x TP mesh: which rank holds which tokens and heads."""
    canvas = Canvas(8.2, 3.9)
    canvas.text(2.4, 0.4, "heads 0-3", size=11)
    canvas.text(4.6, 0.4, "heads 4-7", size=11)
    for cp in range(2):
        y = 1.25 + 1.5 * cp
        canvas.band(y - 0.5, 1.0, 1.2, 5.8)
        canvas.text(1.0, y, f"tokens\nof CP {cp}", side="right")
        for tp in range(2):
            canvas.block(2.4 + 2.2 * tp, y, f"rank {2 * cp + tp}", cp, solid=True, width=1.3)
        canvas.arrow((3.1, y), (3.9, y), INK, style="<|-|>")
        canvas.text(6.0, y, "TP group, one host:\nall-reduce in every layer", size=9, color=FAINT, side="left")
    for tp in range(2):
        canvas.arrow((2.4 + 2.2 * tp, 1.52), (2.4 + 2.2 * tp, 2.48), INK, style="<|-|>")
    canvas.text(3.5, 2.0, "CP groups: the ring", size=9, color=FAINT)
    canvas.text(1.2, 3.6, "rank r has CP index r // tp_size and TP index r % tp_size", size=9, color=FAINT, side="left")
    return canvas


DRAWINGS: dict[str, Callable[[], Canvas]] = {
    "tokens": draw_tokens,
    "pass_kv": draw_pass_kv,
    "pass_q": draw_pass_q,
    "all_gather": draw_all_gather,
    "runahead": draw_runahead,
    "replicated": draw_replicated,
    "mesh": draw_mesh,
}


def main() -> None:
    """Draw everything."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "images")
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWINGS.items():
        draw().save(folder / f"{name}.png")


if __name__ == "__main__":
    main()
