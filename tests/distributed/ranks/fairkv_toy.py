"""Started on every rank: a compression method of one file and one registry line, then as fairkv_kept.py.

Usage: fairkv_toy.py MODEL CASES.json OUT.json CONFIG.json CHECKED.json: what ``megakv check`` says of
CONFIG goes to CHECKED.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parent))

from pydantic import Field
from torch import Tensor

from megakv.fairkv.method import CompressionMethod, Segment
from megakv.fairkv.methods import METHODS


class EveryNth(CompressionMethod):
    """Tokens at multiples of a stride first, then the others, earlier ones first."""

    name: ClassVar[str] = "every_nth"
    stride: int = Field(3, ge=1)

    @property
    def least(self) -> int:
        """One token."""
        return 1

    def scores(self, segment: Segment, mass_KS: Tensor | None) -> Tensor:
        """Earlier is better among equals."""
        score = (segment.order % self.stride == 0).float() * segment.length + segment.length - segment.order
        return score.expand(segment.k_KSD.shape[0], -1)


METHODS[EveryNth.name] = EveryNth

if __name__ == "__main__":
    from fairkv_kept import main

    from megakv.launcher.command import main as command
    from megakv.launcher.process import orderly_end

    with orderly_end():
        config, checked = sys.argv[4:]
        del sys.argv[4:]
        main()
        assert command(["check", config, "--json", checked]) == 0
