#!/usr/bin/env bash
# The main job: four ranks (two on a machine with fewer than four cores) read a long document together and say the
# number hidden in it. Sets up the environment where that is still to do. Arguments pass to ask.py:
#   bash recipes/passkey/run.sh --tokens 8192 --wandb PROJECT
#   bash recipes/passkey/run.sh --prompt-file my_text.txt --question "What is the pass key? The pass key is"
set -euo pipefail
recipe=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$recipe/../.." && pwd)
source "$root/scripts/setup.sh"

for word; do
    case $word in -h | --help) exec python "$recipe/ask.py" --help ;; esac
done
if [ "$(nproc)" -ge 4 ]; then ranks=4 config=cp2_tp2.json; else ranks=2 config=cp2_tp1.json; fi
gpus=$(nvidia-smi -L 2>/dev/null | wc -l || true)
# Ranks that outnumber the GPUs run on the CPU, so that the job is the same everywhere.
[ "${gpus:-0}" -ge "$ranks" ] || export DS_ACCELERATOR=cpu
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
mkdir -p "$root/runs"
port=$(python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')
exec deepspeed --num_accelerators "$ranks" --master_port "$port" --no_local_rank "$recipe/ask.py" \
    --config "$recipe/$config" --compare --json "$root/runs/passkey.json" --timeline "$root/runs/passkey.png" "$@"
