"""Runs a module as a rank on a host that is reached by ssh: ``python -m megakv.launcher.remote MODULE WORDS``.

Its words are written so that no remote shell can change them, and it ends when the connection does.
"""

from __future__ import annotations

import base64
import json
import os
import runpy
import select
import sys
import threading
from collections.abc import Sequence


def encode(words: Sequence[str]) -> str:
    """Words as letters, digits, ``-``, ``_`` and ``=``."""
    return base64.urlsafe_b64encode(json.dumps(list(words)).encode()).decode()


def end_with_reader() -> None:
    """End this process when nobody can read what it prints: whoever started it is gone."""
    output = select.poll()
    # No event but the two that come unasked, an error and a hang-up.
    output.register(sys.stdout.fileno(), 0)

    def watch() -> None:
        output.poll()
        os._exit(1)

    threading.Thread(target=watch, name="megakv reader", daemon=True).start()


def main() -> None:
    """Entry of a process on a host."""
    end_with_reader()
    module, encoded = sys.argv[1:]
    sys.argv = [module, *json.loads(base64.urlsafe_b64decode(encoded))]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
