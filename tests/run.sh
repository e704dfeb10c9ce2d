#!/usr/bin/env bash
# All checks and tests of the project, after setting up the environment where that is still to do.
#   bash tests/run.sh [--full] [pytest arguments]     --full: the whole matrix of models, meshes and lengths
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/setup.sh || exit 1

# The user's own caches and settings stay untouched; nothing is fetched or uploaded.
root=$PWD
mkdir -p .cache/wandb
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
# Some hundred processes import the package: without its bytecode each would compile it.
unset PYTHONDONTWRITEBYTECODE
export HF_HOME=$root/.cache/huggingface HF_HUB_OFFLINE=1 MPLBACKEND=agg MPLCONFIGDIR=$root/.cache/matplotlib
export WANDB_MODE=offline WANDB_SILENT=true WANDB_DIR=$root/.cache/wandb WANDB_DATA_DIR=$root/.cache/wandb
export WANDB_CACHE_DIR=$root/.cache/wandb WANDB_CONFIG_DIR=$root/.cache/wandb

failed=()
check() {
    echo "== $*"
    "$@" || failed+=("$*")
}

# launcher/ becomes megakv.launcher only by installation: laid out so that mypy sees what users import.
types() {
    rm -rf .cache/types && mkdir -p .cache/types/megakv &&
        ln -s "$root"/megakv/* "$root/launcher" .cache/types/megakv/ &&
        (cd .cache/types && mypy --config-file "$root/pyproject.toml" --cache-dir "$root/.cache/mypy" -p megakv)
}

export RUFF_CACHE_DIR=$root/.cache/ruff
check ruff check .
check ruff format --check .
# Beside the tests, which often wait: without its cache mypy takes a core for a minute.
(types) >.cache/types.log 2>&1 &
typed=$!

echo "== pytest $*"
# Tests wait for processes to start, for messages and for clocks: five files at a time keep two cores busy.
pytest -n 5 --dist loadfile --no-loadscope-reorder "$@" </dev/null
status=$?
echo "== types"
wait "$typed" || failed+=("types")
cat .cache/types.log
if [ ${#failed[@]} -gt 0 ]; then
    printf 'FAILED beside the tests: %s\n' "${failed[@]}"
    exit 1
fi
exit $status
