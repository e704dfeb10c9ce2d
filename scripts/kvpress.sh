#!/usr/bin/env bash
# Makes .venv-kvpress, an environment with NVIDIA's kvpress: an oracle for tests/distributed/test_kvpress.py, which is
# skipped without it. kvpress wants an older transformers than MegaKV, so the two cannot share an environment.
# PYTHON=/path/to/python chooses another Python than python3.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
"${PYTHON:-python3}" -m venv --clear .venv-kvpress
.venv-kvpress/bin/python -m pip install --quiet "$(grep -E '^torch==' constraints.txt)" kvpress==0.5.5
.venv-kvpress/bin/python -c 'import kvpress, transformers; print("kvpress with transformers", transformers.__version__)'
