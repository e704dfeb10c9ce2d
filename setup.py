"""The package list; everything else about the distribution is in setup.cfg."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["megakv", "megakv.*"]), "megakv.launcher", "megakv.launcher.commands"],
    package_dir={"megakv.launcher": "launcher"},
    package_data={"megakv": ["py.typed", "csrc/*"], "megakv.serving.http": ["*.html"]},
)
