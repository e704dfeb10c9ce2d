"""The C++: no warnings and right results with each set of vectors; and, with --full, its tests under sanitizers."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megakv.base.kernel_build import FLAGS, PAIRS, SOURCES, VECTORS

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which(os.environ.get("CXX", "c++"))
VECTOR_TESTS = [
    f"attention/test_{name}.py" for name in ("compiled", "linear", "layer", "prefill", "step", "token_layer")
] + [f"weights/test_packed_{name}.py" for name in ("product", "layers")]
KERNEL_TESTS = [*VECTOR_TESTS, "attention/test_bounds.py", "test_channel.py"]
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


def run(test: str, folder: Path, kernels: str, **environ: str) -> None:
    """A file's tests in a process that compiles the C++ so, or finds it in the folder."""
    options = ["-p", "tests.kernels", "--kernels", kernels, "-p", "no:xdist"]
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-s", *options, f"tests/unit/{test}"]
    own = {**os.environ, "OMP_NUM_THREADS": "2", "TORCH_EXTENSIONS_DIR": str(folder), **environ}
    done = subprocess.run(words, cwd=ROOT, env=own, capture_output=True, text=True, timeout=MOST_S)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:] + done.stderr[-6000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Libraries that the tests of this file share."""
    return tmp_path_factory.mktemp("libraries")


@pytest.mark.drawn(1)
@pytest.mark.parametrize("test", VECTOR_TESTS)
@pytest.mark.parametrize("vectors", ["AVX512", "AVX2", "none"])
def test_kernels_for_processors_with_fewer_lanes(folder: Path, vectors: str, test: str) -> None:
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("a processor without AVX2")
    if vectors == "AVX512" and not torch.backends.cpu.get_cpu_capability().startswith(vectors):
        pytest.skip("a processor without AVX-512")
    run(test, folder, vectors)


@pytest.mark.full
@pytest.mark.parametrize("test", KERNEL_TESTS)
def test_kernels_under_sanitizers(folder: Path, test: str) -> None:
    # Both: what throws is looked for where the process begins.
    names = [f"-print-file-name={name}.so" for name in ("libasan", "libstdc++")]
    found = [subprocess.run([str(COMPILER), name], capture_output=True, text=True, check=True) for name in names]
    libraries = [Path(each.stdout.strip()) for each in found]
    if not all(each.is_absolute() for each in libraries):
        pytest.skip(f"{COMPILER} has no address sanitizer")
    # Python itself keeps memory until its end.
    run(test, folder, "sanitized", LD_PRELOAD=" ".join(map(str, libraries)), ASAN_OPTIONS="detect_leaks=0")
