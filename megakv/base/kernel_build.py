"""Compiling the C++ of this package: by a wheel's build for several processors, or at first use for this one.

It needs nothing beyond Python, so that `setup.py` can load it before anything is installed.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SOURCES = Path(__file__).parents[1] / "csrc"
BUILT = SOURCES / "built"
"""Libraries that came with the package."""
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp")
VECTORS = {
    "AVX512": ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-mf16c"),
    "AVX2": ("-mavx2", "-mfma", "-mf16c"),
}
"""Flags by what PyTorch found the processor capable of: a folder may be shared by machines that differ in that."""
PAIRS = ("-mavx512bf16", "-mavx512vnni")
"""Flags beside AVX512's, where the compiler knows them: what is made with them asks the processor before using them."""
COMPILE_S = 300


def flags_for(capability: str) -> Iterator[tuple[str, ...]]:
    """Flags for a processor, the fastest first; older compilers may not know those."""
    flags = next((flags for name, flags in VECTORS.items() if capability.startswith(name)), ())
    if capability.startswith("AVX512"):
        yield (*FLAGS, *flags, *PAIRS)
    yield (*FLAGS, *flags)


def file_name(source: Path, flags: tuple[str, ...]) -> str:
    """The name of a library, by all that it is made of."""
    text = b"".join(path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h"))))
    identity = hashlib.sha256(repr((flags, platform.machine())).encode() + text).hexdigest()
    return f"{source.stem}-{identity[:16]}.so"


def compiled(source: Path, folder: Path, compiler: str, flags: tuple[str, ...]) -> Path:
    """The library for these flags, from the folder if it is there."""
    path = folder / file_name(source, flags)
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with _turn(folder):
        if not path.exists():
            _compile(source, path, compiler, flags)
    return path


def build_all(folder: Path, compiler: str) -> list[Path]:
    """Libraries of all sources for all processors of this architecture, in a folder; empty where none can be had."""
    levels = ("AVX512", "AVX2", "") if platform.machine() in ("x86_64", "AMD64") else ("",)
    made = []
    for source in sorted(SOURCES.glob("*.cpp")):
        for flags in {flags: None for level in levels for flags in flags_for(level)}:
            with suppress(OSError, subprocess.SubprocessError):
                made.append(compiled(source, folder, compiler, flags))
    return made


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
