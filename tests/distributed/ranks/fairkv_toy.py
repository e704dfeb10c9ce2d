"""Started on every rank: a compression method that a plugin registers, then as fairkv_kept.py.

Usage: fairkv_toy.py MODEL CASES.json OUT.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "docs" / "examples"))

if __name__ == "__main__":
    import my_methods  # noqa: F401
    from fairkv_kept import main

    from megakv.launcher.process import orderly_end

    with orderly_end():
        main()
