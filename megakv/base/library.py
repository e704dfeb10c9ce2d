"""Compiled kernels: found with the package, or compiled once for a machine and loaded by every process."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from megakv.base.kernel_build import BUILT, SOURCES, compiled, file_name, flags_for

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""What the kernels read, and how they are told so."""
FAULTS = ("sizes", "bounds of sequences", "runs", "rows", "weights", "parts of ranks", "a channel")
"""What does not fit, by the numbers from 3 on that compiled calls return."""
Kernel = TypeVar("Kernel")


def fault(code: int, lacking: str) -> Exception:
    """The error for what a compiled call returned: what memory was lacking for, or what its caller got wrong."""
    if code == 1:
        return MemoryError(f"no memory for {lacking}")
    return RuntimeError(f"a compiled call was given {FAULTS[code - 3]} that do not fit together")


def load(name: str, make: Callable[[Path], Kernel], check: Callable[[Kernel], str]) -> tuple[Kernel | None, str]:
    """What is made of a library, or None and why: it cannot be had, or `check` says what is wrong with its results."""
    try:
        kernel = make(library(name))
    except (OSError, subprocess.SubprocessError) as error:
        return None, str(error)
    problem = check(kernel)
    return (None, problem) if problem else (kernel, "")


def extensions_folder() -> Path:
    """Where PyTorch, and with it DeepSpeed, keeps what it compiles: no public function knows of its own variable."""
    from torch.utils.cpp_extension import get_default_build_root

    return Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())


def library(name: str) -> Path:
    """The library made of a source, for this machine; an OSError or a SubprocessError says why it cannot be had."""
    from torch.utils.cpp_extension import get_cxx_compiler

    source, problem = SOURCES / f"{name}.cpp", OSError(f"there is no {name}")
    choices = list(flags_for(torch.backends.cpu.get_cpu_capability()))
    for flags in choices:
        if (path := BUILT / file_name(source, flags)).exists():
            return path
    for flags in choices:
        try:
            return compiled(source, extensions_folder() / "megakv", get_cxx_compiler(), flags)
        except OSError as error:
            problem = error
    raise problem
