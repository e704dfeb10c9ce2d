"""Scripts of the folder and their harness can be imported by name, as they import each other."""

import sys

from tests.unit.benchmarks.running import BENCHMARKS

sys.path.append(str(BENCHMARKS))
