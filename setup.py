"""The package list, and the compiled kernels of a wheel; everything else about the distribution is in setup.cfg."""

import os
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


class BuildKernels(build_ext):
    """Kernels for all processors of this architecture; without a compiler the package goes without them."""

    def run(self):
        if self.editable_mode or self.inplace:
            # They are compiled at first use, for the one processor that is there.
            return
        spec = spec_from_file_location("kernel_build", ROOT / "megakv" / "base" / "kernel_build.py")
        build = module_from_spec(spec)
        spec.loader.exec_module(build)
        build.build_all(Path(self.build_lib).resolve() / "megakv" / "csrc" / "built", os.environ.get("CXX", "c++"))

    def get_outputs(self):
        return []


setup(
    packages=[*find_packages(include=["megakv", "megakv.*"]), "megakv.launcher", "megakv.launcher.commands"],
    package_dir={"megakv.launcher": "launcher"},
    package_data={"megakv": ["py.typed", "csrc/*"], "megakv.serving.http": ["*.html"], "megakv.tracking": ["*.html"]},
    # Named so that a wheel is for one platform; no module of Python is made.
    ext_modules=[Extension("megakv.csrc.built", sources=[], optional=True)],
    cmdclass={"build_ext": BuildKernels},
)
