"""A plugin for pytest: this process compiles the C++ with address and undefined-behaviour sanitizers.

``LD_PRELOAD="$(c++ -print-file-name=libasan.so)" TORCH_EXTENSIONS_DIR=FOLDER pytest -p tests.sanitized ...``
"""

from megakv.base import kernel_build

SANITIZERS = ("-O1", "-g1", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
kernel_build.FLAGS = (*SANITIZERS, *kernel_build.FLAGS[1:])
kernel_build.COMPILE_S = 600
