"""A plugin for pytest: its process compiles the C++ otherwise than for this processor.

``pytest -p tests.kernels --kernels AVX2 ...`` takes the loops of processors with eight lanes, ``none`` those with four,
``AVX512`` those with sixteen and neither pairs nor products of bytes.
``sanitized`` finds reads and writes out of bounds, and undefined behaviour: it needs ``LD_PRELOAD`` with the paths that
``c++ -print-file-name=libasan.so`` and ``c++ -print-file-name=libstdc++.so`` print, and `-s`, which lets reports out.
"""

import pytest

from megakv.base import kernel_build

SANITIZERS = ("-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernels", choices=("AVX512", "AVX2", "none", "sanitized"), required=True)


def pytest_configure(config: pytest.Config) -> None:
    kind = config.getoption("--kernels")
    if kind == "sanitized":
        kernel_build.FLAGS = (*SANITIZERS, *kernel_build.FLAGS[1:])
        kernel_build.COMPILE_S = 600
    else:
        kernel_build.VECTORS, kernel_build.PAIRS = {"AVX": kernel_build.VECTORS.get(kind, ())}, ()
