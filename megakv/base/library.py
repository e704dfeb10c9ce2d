"""The C++ of this folder, compiled once for a machine and loaded by every process."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

SOURCES = Path(__file__).parents[1] / "csrc"
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp")
VECTORS = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"),
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
}
"""Flags by what PyTorch found the processor capable of: a folder may be shared by machines that differ in that."""
PAIRS = ("-mavx512bf16",)
"""Flags beside AVX512's, where the compiler knows them: what is made with them asks the processor before using them."""
COMPILE_S = 120
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""What the kernels read, and how they are told so."""


Kernel = TypeVar("Kernel")


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

    capability = torch.backends.cpu.get_cpu_capability()
    flags = next((flags for name, flags in VECTORS.items() if capability.startswith(name)), ())
    make = partial(compiled, SOURCES / f"{name}.cpp", extensions_folder() / "megakv", get_cxx_compiler())
    if capability.startswith("AVX512"):
        with suppress(OSError):
            return make((*FLAGS, *flags, *PAIRS))
    return make((*FLAGS, *flags))


def compiled(source: Path, folder: Path, compiler: str, flags: tuple[str, ...]) -> Path:
    """The library for these flags, from the folder if it is there."""
    text = b"".join(path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h"))))
    identity = hashlib.sha256(repr((flags, platform.machine())).encode() + text).hexdigest()
    path = folder / f"{source.stem}-{identity[:16]}.so"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with _turn(folder):
        if not path.exists():
            _compile(source, path, compiler, flags)
    return path


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """One process after the other: all ranks want the same at the same time, and one of them need compile it."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        # Where folders cannot be locked all compile.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _compile(source: Path, path: Path, compiler: str, flags: tuple[str, ...]) -> None:
    # Nobody loads what is half written.
    handle, name = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        done = subprocess.run(
            [compiler, *flags, str(source), "-o", name], capture_output=True, text=True, timeout=COMPILE_S, check=False
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if "error" in line] or [f"exit code {done.returncode}"]
            raise OSError(f"{compiler} cannot compile {source}: {lines[0]}")
        os.replace(name, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)
