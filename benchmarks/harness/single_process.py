"""Benchmarks of one process, which measures a GPU or this machine's processor."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable


def run_single_process(
    arguments: argparse.Namespace, run: Callable[[argparse.Namespace], None], *, on_cpu: str = "tries the same code"
) -> int:
    """Run a benchmark, if its device is there, and say what users can mend in a line."""
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(f"this machine has no CUDA GPU: nothing is measured; --device cpu {on_cpu}", file=sys.stderr)
        return 2
    from megakv.errors import MegaKVError
    from megakv.launcher.process import quiet_libraries

    quiet_libraries()
    try:
        run(arguments)
    except MegaKVError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
