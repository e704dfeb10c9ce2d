#!/usr/bin/env bash
# What MegaKV claims of a GPU, measured on one within 7 minutes: `bash scripts/gpu_claims.sh [--seconds N] [--out DIR]
# [--only PART,...] [--rehearse]`, see gpu_claims.py. It sets up with scripts/setup.sh, whose time counts: a torch that is
# there is used. Where no package index can be reached, PIP_NO_INDEX=1 PIP_FIND_LINKS=DIR takes the other packages from
# wheels in a folder. `--rehearse` runs every part on the processor, tiny.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
began=$(date +%s)
source scripts/setup.sh || exit 1
exec python scripts/gpu_claims.py --began "$began" "$@"
