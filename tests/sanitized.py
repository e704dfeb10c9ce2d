"""A plugin for pytest: this process compiles the C++ with address and undefined-behaviour sanitizers.

``LD_PRELOAD="LIBASAN LIBSTDC++" TORCH_EXTENSIONS_DIR=FOLDER pytest -s -p tests.sanitized ...``, with the paths that
``c++ -print-file-name=libasan.so`` and ``c++ -print-file-name=libstdc++.so`` print. Reports come where `-s` lets them.
"""

from megakv.base import kernel_build

SANITIZERS = ("-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
kernel_build.FLAGS = (*SANITIZERS, *kernel_build.FLAGS[1:])
kernel_build.COMPILE_S = 600
