"""The C++: no warnings, with each set of vectors; and, with --full, its tests under sanitizers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megakv.base.kernel_build import FLAGS, PAIRS, SOURCES, VECTORS

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
KERNEL_TESTS = ("test_compiled", "test_linear", "test_layer", "test_prefill", "test_step")
MOST_S = 1500

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")


@pytest.mark.drawn(1)
@pytest.mark.parametrize("vectors", ["", "AVX2", "AVX512", "pairs"])
def test_sources_have_no_warnings(vectors: str) -> None:
    """Each as for a processor without vectors, with four or eight lanes, with sixteen, and with pairs."""
    flags = (*VECTORS["AVX512"], *PAIRS) if vectors == "pairs" else VECTORS.get(vectors, ())
    given = [flag for flag in FLAGS if flag not in ("-O3", "-shared")]
    for source in sorted(SOURCES.glob("*.cpp")):
        words = [str(COMPILER), *given, *flags, "-Wall", "-Wextra", "-fsyntax-only", str(source)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=MOST_S)
        assert done.returncode == 0 and not done.stderr, done.stderr[:2000]


@pytest.mark.full
def test_kernels_under_sanitizers(tmp_path: Path) -> None:
    found = subprocess.run([str(COMPILER), "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    library = found.stdout.strip()
    if not Path(library).is_absolute():
        pytest.skip(f"{COMPILER} has no address sanitizer")
    # Python itself keeps memory until its end.
    environ = {**os.environ, "LD_PRELOAD": library, "ASAN_OPTIONS": "detect_leaks=0", "OMP_NUM_THREADS": "2"}
    environ["TORCH_EXTENSIONS_DIR"] = str(tmp_path)
    tests = [f"tests/unit/attention/{name}.py" for name in KERNEL_TESTS]
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "tests.sanitized", "-p", "no:xdist", *tests]
    done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=MOST_S)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
