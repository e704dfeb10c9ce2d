#!/usr/bin/env bash
# Rehearses the CUDA path on a machine without a GPU, see cuda_rehearsal.py: `bash scripts/cuda_rehearsal.sh [--json F]`.
# With `--counts` in front, it counts what reaches a device instead, see cuda_counts.py. It uses the environment of
# scripts/setup.sh, and a C++ compiler.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh
export DS_ACCELERATOR=cuda LOCAL_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=0 OMP_NUM_THREADS=1 PYTHONPATH=tests
script=cuda_rehearsal.py
if [ "${1:-}" = --counts ]; then
    script=cuda_counts.py
    shift
fi
exec python "scripts/$script" "$@"
