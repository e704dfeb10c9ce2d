"""Runs a module with words that no remote shell can change: ``python -m megakv.launcher.remote MODULE WORDS``."""

from __future__ import annotations

import base64
import json
import runpy
import sys
from collections.abc import Sequence


def encode(words: Sequence[str]) -> str:
    """Words as letters, digits, ``-``, ``_`` and ``=``."""
    return base64.urlsafe_b64encode(json.dumps(list(words)).encode()).decode()


def main() -> None:
    """Entry of a process on a host."""
    module, encoded = sys.argv[1:]
    sys.argv = [module, *json.loads(base64.urlsafe_b64decode(encoded))]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
